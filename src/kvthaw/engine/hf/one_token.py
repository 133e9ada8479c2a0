"""Compute a decoder layer's step of one token with four launches for its linear layers, norms, gate and sums.

This serves layers with the code of Llama's: Mistral, Qwen2, Qwen3 and others have it too. The attention module runs as it is,
with its hooks. For the call, linear layers, norms and the MLP get other forwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeGuard

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter

from kvthaw.engine.hf.tensor_parallel import AllReduce, LocalLinear
from kvthaw.kernels.linear import Norm, linear

_NAMES = frozenset(
    {
        *("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "query_layernorm", "key_layernorm", "use_rope"),
        *(
            "shape",
            "view",
            "transpose",
            "reshape",
            "contiguous",
            "head_dim",
            "layer_idx",
            "scaling",
            "sliding_window",
            "getattr",
        ),
        *("apply_rotary_pos_emb", "update", "config", "_attn_implementation", "training", "attention_dropout"),
        *("ALL_ATTENTION_FUNCTIONS", "get_interface", "eager_attention_forward"),
    }
)
"""What an attention module may use so that it returns what its o_proj returns: nothing follows that projection."""


def returns_projection(attention: type[Module]) -> bool:
    """Return whether the attention modules of a class return the result of `o_proj` as it is."""
    code = getattr(inspect.unwrap(attention.forward), "__code__", None)
    return code is not None and "o_proj" in code.co_names and set(code.co_names) <= _NAMES


class InputUnread:
    """A pre-hook of an attention module that does not look at the module's hidden state."""


@dataclass(frozen=True, slots=True)
class _Projection:
    """A linear layer of this process.

    reduce: adds up the parts of all processes; None if the result is whole.
    """

    module: Module
    weight: Tensor
    bias: Tensor | None
    reduce: AllReduce | None

    @classmethod
    def of(cls, module: Module | None, x: Tensor) -> Self | None:
        """Return a module's projection of x; None for a module that computes something else."""
        if type(module) is not Linear or module._forward_hooks or module._forward_pre_hooks:
            return None
        forward = vars(module).get("forward")
        found: Self | None = None
        if forward is None and type(module.weight) is Parameter:
            found = cls(module, module.weight, module.bias, None)
        elif isinstance(forward, LocalLinear):
            found = cls(module, forward.weight, forward.bias, forward.reduce)
        return found if found is not None and found._fits(x) else None

    def _fits(self, x: Tensor) -> bool:
        given = (self.weight, *(() if self.bias is None else (self.bias,)))
        return all(one.dtype == x.dtype and one.device == x.device and one.is_contiguous() for one in given)

    def onto(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return residual + x W' + b."""
        if self.reduce is None:
            return linear(x, [self.weight], [self.bias], residual=residual)[0]
        mine = linear(x, [self.weight], [None], residual=residual if self.reduce.first else None)[0]
        total = self.reduce(mine)  # one process added the residual
        return total if self.bias is None else total + self.bias


@dataclass(frozen=True, slots=True)
class Layer:
    """What a decoder layer computes with, apart from its attention."""

    before: Norm
    after: Norm
    qkv: Sequence[_Projection]
    o: _Projection
    gates: Sequence[_Projection]
    down: _Projection

    @classmethod
    def of(cls, layer: Any, x: Tensor) -> Self | None:
        """Return the parts of a layer for a hidden state x; None if it has others."""
        attention, mlp = layer.self_attn, layer.mlp
        read = [hook for hook in attention._forward_pre_hooks.values() if not isinstance(hook, InputUnread)]
        if read or attention._forward_hooks or mlp._forward_pre_hooks or mlp._forward_hooks:
            return None  # they would see a hidden state before its norm, or a result with the residual in it
        before, after = _norm_of(layer.input_layernorm, x), _norm_of(layer.post_attention_layernorm, x)
        qkv = [_Projection.of(getattr(attention, name, None), x) for name in ("q_proj", "k_proj", "v_proj")]
        o, down = _Projection.of(getattr(attention, "o_proj", None), x), _Projection.of(getattr(mlp, "down_proj", None), x)
        gates = [_Projection.of(getattr(mlp, name, None), x) for name in ("gate_proj", "up_proj")]
        if before is None or after is None or o is None or down is None or not (_alike(qkv) and _alike(gates)):
            return None
        return cls(before, after, qkv, o, gates, down)

    def forwards(self, hidden: Tensor, mlp: Module) -> list[tuple[Module, Callable[..., Any]]]:
        """Return the modules of a step with what they compute in it. The norms hand their input on to the projections."""
        found = list[Tensor]()

        def query(module: Module, x: Tensor) -> Tensor:
            found.extend(linear(x, [one.weight for one in self.qkv], [one.bias for one in self.qkv], norm=self.before))
            return found[0]

        def feed(module: Module, x: Tensor) -> Tensor:
            weights, biases = [one.weight for one in self.gates], [one.bias for one in self.gates]
            (inner,) = linear(x, weights, biases, norm=self.after, gated=True)
            return self.down.onto(inner, x)

        projections = [one.module for one in self.qkv]
        given = [query, lambda module, x: found[1], lambda module, x: found[2]]
        return [
            *zip(projections, given, strict=True), (self.o.module, lambda module, x: self.o.onto(x, hidden)), (mlp, feed)
        ]  # fmt: skip


def _alike(projections: Sequence[_Projection | None]) -> TypeGuard[Sequence[_Projection]]:
    """Return whether all projections are there, and all of them or none have a bias."""
    found = [one for one in projections if one is not None]
    return len(found) == len(projections) and len({one.bias is None for one in found}) == 1


def serves(layer: Module, hidden: Tensor) -> bool:
    """Return whether a hidden state is one token, on which a layer computes without gradients and without autocast."""
    return (
        type(hidden) is Tensor
        and hidden.numel() == hidden.shape[-1]
        and hidden.is_contiguous()
        and hidden.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and not (torch.is_grad_enabled() and hidden.requires_grad)
        and not torch.is_autocast_enabled(hidden.device.type)
        and not layer.training
    )


def _norm_of(norm: Any, x: Tensor) -> Norm | None:
    weight = norm.weight
    plain = type(weight) is Parameter and weight.dtype == x.dtype and weight.device == x.device and weight.is_contiguous()
    return Norm(weight, norm.variance_epsilon) if plain and not norm._forward_hooks else None
