"""Compute steps of one token with the kernel of linear layers, which loads weights before its predecessor ends.

A decoder layer with the code of Llama's takes four launches for its linear layers, norms, gate and sums. Mistral, Qwen2, Qwen3 and
others have that code. The attention module runs as it is, with its hooks. For the call, linear layers, norms and the MLP get other
forwards. Other layers take a launch for each linear layer, and one for a gate with its two. Weights that torchao quantised are read
as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Linear, Module

from kvthaw.engine.hf.recognised import gate_of, inference, norm_of, weight_of
from kvthaw.engine.hf.tensor_parallel import AllReduce, LocalLinear
from kvthaw.kernels.gated import Activation
from kvthaw.kernels.linear import linear
from kvthaw.kernels.rms_norm import Norm
from kvthaw.kernels.weights import Weight, kind_of, readable


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer of this process.

    weight: a tensor, or what torchao made of it, as kernels read it.
    reduce: adds up the parts of all processes; None if the result is whole.
    """

    module: Module
    weight: Weight
    bias: Tensor | None
    reduce: AllReduce | None

    @classmethod
    def of(cls, module: Module | None, x: Tensor) -> Self | None:
        """Return a module's projection of x; None for a module that computes something else."""
        if type(module) is not Linear or module._forward_hooks or module._forward_pre_hooks:
            return None
        forward = vars(module).get("forward")
        found: Self | None = None
        if forward is None or getattr(forward, "__func__", None) is product:
            weight = weight_of(module.weight) if module.weight.dtype == x.dtype else None
            found = None if weight is None else cls(module, weight, module.bias, None)
        elif isinstance(forward, LocalLinear):
            found = cls(module, forward.weight, forward.bias, forward.reduce)
        return found if found is not None and found._fits(x) else None

    def _fits(self, x: Tensor) -> bool:
        fits = self.weight.device == x.device and readable(self.weight, x.dtype)
        return fits and (self.bias is None or _plain(self.bias, x))

    def onto(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Return residual + x W' + b."""
        if self.reduce is None:
            return linear(x, [self.weight], [self.bias], residual=residual)[0]
        mine = linear(x, [self.weight], [None], residual=residual if self.reduce.first else None)[0]
        total = self.reduce(mine)  # one process added the residual
        return total if self.bias is None else total + self.bias


@dataclass(frozen=True, slots=True)
class Gate:
    """A feed-forward layer with a gate.

    inner: its gate and its up projection.
    """

    inner: Sequence[Projection]
    down: Projection
    activation: Activation

    @classmethod
    def of(cls, mlp: Any, x: Tensor) -> Self | None:
        """Return what a module computes of x; None if it is no such layer."""
        activation = gate_of(mlp)
        if activation is None:
            return None
        inner, down = [Projection.of(module, x) for module in (mlp.gate_proj, mlp.up_proj)], Projection.of(mlp.down_proj, x)
        return cls(inner, down, activation) if down is not None and _alike(inner) else None

    def __call__(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        """Return what the down projection gets, for x before the norm."""
        weights, biases = [one.weight for one in self.inner], [one.bias for one in self.inner]
        return linear(x, weights, biases, norm=norm, gate=self.activation)[0]


@dataclass(frozen=True, slots=True)
class Layer:
    """What a decoder layer computes with, apart from its attention."""

    before: Norm
    after: Norm
    qkv: Sequence[Projection]
    o: Projection
    gate: Gate

    @classmethod
    def of(cls, layer: Any, x: Tensor) -> Self | None:
        """Return the parts of a layer for a hidden state x; None if it has others."""
        attention, mlp = layer.self_attn, layer.mlp
        if any(one._forward_pre_hooks or one._forward_hooks for one in (attention, mlp)):
            return None  # they would see a hidden state before its norm, or a result with the residual in it
        before, after = _norm(layer.input_layernorm, x), _norm(layer.post_attention_layernorm, x)
        qkv = [Projection.of(getattr(attention, name, None), x) for name in ("q_proj", "k_proj", "v_proj")]
        o = Projection.of(getattr(attention, "o_proj", None), x)
        gate = Gate.of(mlp, x)
        if before is None or after is None or o is None or gate is None or not _alike(qkv):
            return None
        return cls(before, after, qkv, o, gate)

    def forwards(self, hidden: Tensor, mlp: Module) -> list[tuple[Module, Callable[..., Any]]]:
        """Return the modules of a step with what they compute in it. The norms hand their input on to the projections."""
        found = list[Tensor]()

        def query(module: Module, x: Tensor) -> Tensor:
            found.extend(linear(x, [one.weight for one in self.qkv], [one.bias for one in self.qkv], norm=self.before))
            return found[0]

        def feed(module: Module, x: Tensor) -> Tensor:
            return self.gate.down.onto(self.gate(x, self.after), x)

        projections = [one.module for one in self.qkv]
        given = [query, lambda module, x: found[1], lambda module, x: found[2]]
        return [
            *zip(projections, given, strict=True), (self.o.module, lambda module, x: self.o.onto(x, hidden)), (mlp, feed)
        ]  # fmt: skip


def _alike(projections: Sequence[Projection | None]) -> TypeGuard[Sequence[Projection]]:
    """Return whether all projections are there, with weights of one kind, and all of them or none have a bias."""
    found = [one for one in projections if one is not None]
    return len(found) == len(projections) and len({(one.bias is None, kind_of(one.weight)) for one in found}) == 1


def serves(x: Tensor) -> bool:
    """Return whether a hidden state is one token that is computed without gradients and without autocast."""
    return x.numel() == x.shape[-1] and inference(x) and x.is_contiguous() and not torch.is_autocast_enabled(x.device.type)


def product(self: Any, input: Tensor) -> Tensor:
    """The forward of a linear layer: the kernel for one token, else torch's product."""
    if serves(input) and (found := Projection.of(self, input)) is not None:
        return found.onto(input, None)
    return F.linear(input, self.weight, self.bias)


def _norm(module: Any, x: Tensor) -> Norm | None:
    """Return what a norm computes of x, unless a hook reads its result."""
    norm = None if module._forward_hooks else norm_of(module)
    return norm if norm is not None and _plain(norm.weight, x) else None


def _plain(weight: Tensor, x: Tensor) -> bool:
    return weight.dtype == x.dtype and weight.device == x.device and weight.is_contiguous()
