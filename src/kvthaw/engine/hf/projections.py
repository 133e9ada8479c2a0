"""Compute the linear layers of a decoder layer in few launches, with the norms, gates and sums between them.

For one token the kernel of linear layers loads weights before its predecessor ends. A decoder layer with the code of Llama's then
takes four launches for its linear layers, norms, gate and sums. Mistral, Qwen2, Qwen3 and others have that code. For more tokens
one product computes query, key and value, and one computes gate and up: their weights lie next to each other (`place_together`).

The attention module runs as it is, with its hooks. For the call, linear layers, norms and the MLP get other forwards. Weights that
torchao quantised are read as they are, for one token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Linear, Module, Parameter

from kvthaw.engine.hf.recognised import gate_of, inference, norm_of, turns_last, weight_of
from kvthaw.engine.hf.tensor_parallel import AllReduce, LocalLinear
from kvthaw.kernels.gated import Activation, gated
from kvthaw.kernels.linear import Turn, linear
from kvthaw.kernels.rms_norm import MOST, Norm, add_rms_norm, rms_norm
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
        fits = (
            self.weight.device == x.device and readable(self.weight, x.dtype) and (single(x) or isinstance(self.weight, Tensor))
        )
        return fits and (self.bias is None or _plain(self.bias, x))

    def onto(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Return residual + x W' + b."""
        bias = self.bias if self.reduce is None else None
        if single(x):  # one process adds the residual
            adds = residual if self.reduce is None or self.reduce.first else None
            total = linear(x, [self.weight], [bias], residual=adds)[0]
        else:
            total = F.linear(x, plain(self.weight), bias)
        if self.reduce is not None:
            total = self.reduce(total)
            total = total if self.bias is None else total + self.bias
        return total if residual is None or single(x) else residual + total


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
        """Return what the down projection gets, for x before the norm if one is given."""
        if single(x):
            weights, biases = [one.weight for one in self.inner], [one.bias for one in self.inner]
            return linear(x, weights, biases, norm=norm, gate=self.activation)[0]
        gate, up = together(x, self.inner, norm)
        return gated(gate, up, self.activation, overwrite=True)


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

    def turn(self, attention: Any, x: Tensor, angles: object) -> Turn | None:
        """Return the rotary position with which q and k can be computed; None if the attention module must turn them.

        angles: the module's position_embeddings, cosines and sines [1, 1, D].
        """
        if not single(x) or not turns_last(attention) or not isinstance(angles, tuple) or len(angles) != 2:
            return None
        if not all(isinstance(one, Tensor) and one.shape == (1, 1, attention.head_dim) for one in angles):
            return None
        found = Turn(angles[0].view(-1), angles[1].view(-1))
        return found if all(found.fits(one.weight, x.dtype) for one in self.qkv[:2]) else None

    def forwards(self, hidden: Tensor, mlp: Module, turn: Turn | None) -> list[tuple[Module, Callable[..., Any]]]:
        """Return the modules of a forward with what they compute in it. The norms hand their input on to the projections."""
        found = list[Tensor]()

        def query(module: Module, x: Tensor) -> Tensor:
            found.extend(together(x, self.qkv, self.before, turn))
            return found[0]

        def output(module: Module, x: Tensor) -> Tensor:
            if single(x):
                return self.o.onto(x, hidden)
            total, normed = add_rms_norm(self.o.onto(x, None), hidden, self.after)
            found.append(normed)
            return total

        def feed(module: Module, x: Tensor) -> Tensor:
            inner = self.gate(x, self.after) if single(x) else self.gate(found.pop())
            return self.gate.down.onto(inner, x)

        projections = [one.module for one in self.qkv]
        given = [query, lambda module, x: found[1], lambda module, x: found[2]]
        return [*zip(projections, given, strict=True), (self.o.module, output), (mlp, feed)]


def together(x: Tensor, projections: Sequence[Projection], norm: Norm | None = None, turn: Turn | None = None) -> list[Tensor]:
    """Return the products of x [..., K], normalised before if a norm is given, with the weights of projections.

    turn: for one token, turns the first two.
    """
    weights, biases = [one.weight for one in projections], [one.bias for one in projections]
    if single(x):
        return linear(x, weights, biases, norm=norm, turn=turn)
    x, some = x if norm is None else rms_norm(x, norm), [plain(weight) for weight in weights]
    given = [bias for bias in biases if bias is not None]
    weight, bias = adjacent(some), adjacent(given) if given else None
    if weight is None or (given and bias is None):
        return [F.linear(x, weight, bias) for weight, bias in zip(some, biases, strict=True)]
    return list(F.linear(x, weight, bias).split([len(one) for one in some], dim=-1))


def plain(weight: Weight) -> Tensor:
    """Return a weight that is a tensor. Raises TypeError for another."""
    if not isinstance(weight, Tensor):
        raise TypeError(f"weight is a {type(weight).__name__}; torch multiplies tensors")
    return weight


def adjacent(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return one tensor of the rows of all tensors if they follow each other in memory, else None."""
    first, rows = tensors[0], sum(map(len, tensors))
    storage, at = first.untyped_storage().data_ptr(), first.data_ptr()
    for one in tensors:
        if one.data_ptr() != at or one.untyped_storage().data_ptr() != storage:
            return None
        at += one.nbytes
    return first.as_strided((rows, *first.shape[1:]), first.stride())


@torch.inference_mode(False)
@torch.no_grad()
def place_together(modules: Sequence[Module | None]) -> None:
    """Move the weights and biases of linear layers so that they follow each other in memory, where one product reads them.

    Parameters keep their values and their identity. A parameter that shares its memory with another stays where it is.
    """
    if not all(type(module) is Linear and "forward" not in vars(module) for module in modules):
        return
    for name in ("weight", "bias"):
        own = [getattr(module, name) for module in modules]
        if not all(_movable(one, own[0]) for one in own) or adjacent(own) is not None:
            continue
        parts = torch.cat([one.detach() for one in own]).split([len(one) for one in own])
        for one, part in zip(own, parts, strict=True):
            one.data = part


def _movable(one: Any, like: Any) -> bool:
    if type(one) is not Parameter or not one.is_contiguous() or one.untyped_storage().nbytes() != one.nbytes:
        return False
    return bool(one.dtype == like.dtype and one.device == like.device and one.shape[1:] == like.shape[1:])


def _alike(projections: Sequence[Projection | None]) -> TypeGuard[Sequence[Projection]]:
    """Return whether all projections are there, with weights of one kind, and all of them or none have a bias."""
    found = [one for one in projections if one is not None]
    return len(found) == len(projections) and len({(one.bias is None, kind_of(one.weight)) for one in found}) == 1


def single(x: Tensor) -> bool:
    """Return whether a hidden state is one token."""
    return x.numel() == x.shape[-1]


def serves(x: Tensor) -> bool:
    """Return whether a hidden state is computed without gradients and without autocast, in rows that a norm can take."""
    plain = inference(x) and x.is_contiguous() and x.numel() > 0
    return plain and x.shape[-1] <= MOST and not torch.is_autocast_enabled(x.device.type)


def product(self: Any, input: Tensor) -> Tensor:
    """The forward of a linear layer: the kernel for one token, else torch's product."""
    if single(input) and serves(input) and (found := Projection.of(self, input)) is not None:
        return found.onto(input, None)
    return F.linear(input, self.weight, self.bias)


def _norm(module: Any, x: Tensor) -> Norm | None:
    """Return what a norm computes of x, unless a hook reads its result."""
    norm = None if module._forward_hooks else norm_of(module)
    return norm if norm is not None and _plain(norm.weight, x) else None


def _plain(weight: Tensor, x: Tensor) -> bool:
    return weight.dtype == x.dtype and weight.device == x.device and weight.is_contiguous()
