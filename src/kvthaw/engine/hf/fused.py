"""Run the operations between a model's matrix products in one launch each: norms, rotary positions, gates.

transformers launches about 35 kernels per layer for them. They move 480 GB for a prompt of 36k tokens of an 8B model, and
lie between the products of a captured step. Inside `fused`, modules whose code computes what a kernel computes use that
kernel. A module qualifies by its code, which is compared with transformers' Llama, which most decoders share.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter, SiLU
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama as llama

from kvthaw.engine.hf import one_token
from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.gated import gated
from kvthaw.kernels.rms_norm import MOST, rms_norm
from kvthaw.kernels.rotate import rotate, serves

_SILU = (SiLU, type(ACT2FN["silu"]))
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ROTATES = "apply_rotary_pos_emb"
_Forward = Callable[..., Any]
_KNOWN: weakref.WeakKeyDictionary[PreTrainedModel, list[tuple[weakref.ref[Module], _Forward]]] = weakref.WeakKeyDictionary()
"""Modules of a model that have kernels, with their new forwards. Finding them takes a millisecond."""


@contextmanager
def fused(model: PreTrainedModel) -> Iterator[None]:
    """Context in which modules of a model on a GPU use the kernels. A module that has an instance forward keeps it."""
    if not _on_gpu(model):
        yield
        return
    if model not in _KNOWN:
        _KNOWN[model] = find(model)
    with swapped([(module, forward) for ref, forward in _KNOWN[model] if (module := ref()) is not None]):
        yield


def _on_gpu(model: PreTrainedModel) -> bool:
    return HAS_TRITON and model.device.type == "cuda"


def fusing(model: PreTrainedModel, forward: _Forward) -> _Forward:
    """Wrap a model's forward so that it runs within `fused`."""

    def run(*args: Any, **given: Any) -> Any:
        with fused(model):
            return forward(*args, **given)

    return run


@contextmanager
def swapped(forwards: list[tuple[Module, _Forward]], *, all: bool = False) -> Iterator[None]:
    """Context in which modules have these forwards.

    all: also modules that have an instance forward; otherwise they keep it.
    """
    mine = [(vars(module), module, forward) for module, forward in forwards if all or "forward" not in vars(module)]
    before: list[Any] = [own.get("forward") for own, _, _ in mine]
    for own, module, forward in mine:
        own["forward"] = types.MethodType(forward, module)
    try:
        yield
    finally:
        for (own, _, _), forward in zip(mine, before, strict=True):
            if forward is None:
                own.pop("forward", None)
            else:
                own["forward"] = forward


def find(model: PreTrainedModel) -> list[tuple[weakref.ref[Module], _Forward]]:
    """Return the modules of a model whose forward has a kernel, with that forward."""
    rotating: dict[type[Module], _Forward | None] = {}
    found = list[tuple[weakref.ref[Module], _Forward]]()
    for module in model.modules():
        kind = type(module)
        forward: _Forward | None
        if _same(kind.forward, llama.LlamaRMSNorm.forward):
            forward = _norm
        elif _is_mlp(module):
            forward = _mlp
        elif _same(kind.forward, llama.LlamaDecoderLayer.forward) and _is_layer(module):
            forward = _layer
        else:
            if kind not in rotating:
                rotating[kind] = _rotating(_renamed(kind.forward))
            forward = rotating[kind]
        if forward is not None:
            found.append((weakref.ref(module), forward))
    return found


def _is_mlp(module: Module) -> bool:
    return _same(type(module).forward, llama.LlamaMLP.forward) and isinstance(getattr(module, "act_fn", None), _SILU)


def _is_layer(layer: Any) -> bool:
    """Return whether a layer with the code of Llama's has its norms, its MLP and an attention that a step can join."""
    norms = all(
        _same(type(one).forward, llama.LlamaRMSNorm.forward) for one in (layer.input_layernorm, layer.post_attention_layernorm)
    )
    return norms and _is_mlp(layer.mlp) and one_token.returns_projection(type(layer.self_attn))


def _same(one: Any, other: Any) -> bool:
    """Return whether two functions have the same code, without what is wrapped around them."""
    return one is other or None is not _computes(one) == _computes(other)


def _computes(function: Any) -> tuple[Any, ...] | None:
    """Return the code of a Python function without names of variables and its docstring."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    return code.co_code, code.co_names, tuple(const for const in code.co_consts if const != function.__doc__)


def _renamed(forward: Any) -> Any:
    """Return a forward without the wrapper that transformers 5.24 has around it for arguments' old names."""
    code = getattr(forward, "__code__", None)
    return forward.__wrapped__ if code is not None and code.co_qualname.startswith("deprecate_kwarg.") else forward


def _rotating(forward: Any) -> _Forward | None:
    """Return an attention's forward with the kernel's rotary positions; None if it has other rotary positions or none."""
    code, known = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    turn: Any = known.get(_ROTATES)
    if code is None or _ROTATES not in code.co_names or not _same(turn, llama.apply_rotary_pos_emb):
        return None
    if not _same(turn.__globals__.get("rotate_half"), llama.rotate_half):
        return None
    rotating = types.FunctionType(
        code, {**known, _ROTATES: _turned(turn)}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    rotating.__kwdefaults__ = forward.__kwdefaults__
    return rotating


def _turned(plain: _Forward) -> _Forward:
    """Return a function that rotates queries and keys with the kernel, or with `plain` where the kernel does not apply."""

    def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        if unsqueeze_dim == 1 and _inference(q) and q.ndim == 4 and serves(q, k, cos, sin):
            return rotate(q, k, cos, sin)
        turned: tuple[Tensor, Tensor] = plain(q, k, cos, sin, unsqueeze_dim)
        return turned

    return turn


def _norm(self: Any, hidden_states: Tensor) -> Tensor:
    """Normalise with the kernel if it supports these rows."""
    x = hidden_states
    weight = self.weight
    here = type(weight) is Parameter and weight.device == x.device
    if here and _inference(x) and x.is_contiguous() and x.shape[-1] <= MOST:
        return rms_norm(x, self.weight, self.variance_epsilon)
    plain: Tensor = type(self).forward(self, x)
    return plain


def _mlp(self: Any, x: Tensor) -> Tensor:
    """Multiply gate and up projections with the kernel if it supports them."""
    gate, up = self.gate_proj(x), self.up_proj(x)
    like = gate.shape == up.shape and gate.dtype == up.dtype
    if _inference(gate) and like and gate.is_contiguous() and up.is_contiguous():
        return self.down_proj(gated(gate, up))  # type: ignore[no-any-return]
    return self.down_proj(self.act_fn(gate) * up)  # type: ignore[no-any-return]


def _layer(self: Any, hidden_states: Tensor, *args: Any, **given: Any) -> Tensor:
    """Compute a step of one token with joined launches; else as the layer computes."""
    parts = one_token.Layer.of(self, hidden_states) if not args and one_token.serves(self, hidden_states) else None
    if parts is None:
        plain: Tensor = type(self).forward(self, hidden_states, *args, **given)
        return plain
    norms: list[tuple[Module, _Forward]] = [(self.input_layernorm, _unchanged), (self.post_attention_layernorm, _unchanged)]
    with swapped([*norms, *parts.forwards(hidden_states, self.mlp)], all=True):
        hidden, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **given)
        out: Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return out


def _unchanged(module: Module, x: Tensor) -> Tensor:
    return x


def _inference(x: Tensor) -> bool:
    """Return whether a tensor is a plain one, of a dtype that the kernels support, without a gradient."""
    return type(x) is Tensor and x.dtype in _DTYPES and not (torch.is_grad_enabled() and x.requires_grad)
