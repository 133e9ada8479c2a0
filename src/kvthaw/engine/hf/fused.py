"""Run a model's norms, rotary positions and gates with kernels of kvthaw, and its linear layers together or by a kernel.

transformers launches about 35 kernels per layer between its products. They move 480 GB for a prompt of 36k tokens of an 8B model,
and lie between the products of a captured step. Inside `fused`, modules whose code computes what a kernel computes use that kernel
(recognised.py).
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import Linear, Module
from transformers import PreTrainedModel

from kvthaw.engine.hf import projections
from kvthaw.engine.hf.recognised import gate_of, inference, is_layer, norm_of, rotating
from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.gated import gated
from kvthaw.kernels.gated import serves as multiplies
from kvthaw.kernels.rms_norm import MOST, rms_norm

_Forward = Callable[..., Any]
_MODULES = "_kvthaw_modules"
"""The attribute of a model that holds its KernelModules."""


class KernelModules:
    """Modules of a model that have kernels, with their new forwards. Finding them takes a millisecond."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.forwards = find(model)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Make None of this in a copy of the model, which finds its own modules."""
        return type(None), ()


@contextmanager
def fused(model: PreTrainedModel) -> Iterator[None]:
    """Context in which modules of a model on a GPU use the kernels. A module that has an instance forward keeps it."""
    if not _on_gpu(model):
        yield
        return
    if vars(model).get(_MODULES) is None:
        vars(model)[_MODULES] = KernelModules(model)
    with swapped([(module, forward) for ref, forward in vars(model)[_MODULES].forwards if (module := ref()) is not None]):
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
    """Return the modules of a model whose forward has a kernel, with that forward. Moves weights that one product shall read."""
    for module in model.modules():
        if is_layer(module):
            projections.place_together([getattr(module.self_attn, name, None) for name in ("q_proj", "k_proj", "v_proj")])
        if gate_of(module) is not None:
            projections.place_together([module.gate_proj, module.up_proj])
    found = ((module, _forward(module)) for module in model.modules())
    return [(weakref.ref(module), forward) for module, forward in found if forward is not None]


def _forward(module: Module) -> _Forward | None:
    if type(module) is Linear:
        return projections.product
    if norm_of(module) is not None:
        return _norm
    if gate_of(module) is not None:
        return _mlp
    return _layer if is_layer(module) else rotating(module)


def _norm(self: Any, *given: Tensor, **named: Tensor) -> Tensor:
    """Normalise with the kernel if it supports these rows, which norms call x or hidden_states."""
    (x,), norm = (*given, *named.values()), norm_of(self)
    if norm is not None and norm.weight.device == x.device and inference(x) and x.shape[-1] <= MOST:
        return rms_norm(x.contiguous(), norm)
    plain: Tensor = type(self).forward(self, x)
    return plain


def _mlp(self: Any, x: Tensor) -> Tensor:
    """Multiply gate and up projections with the kernel if it supports them."""
    joined = projections.Gate.of(self, x) if projections.serves(x) else None
    if joined is not None:
        return joined.down.onto(joined(x), None)
    gate, up, activation = self.gate_proj(x), self.up_proj(x), gate_of(self)
    if activation is not None and inference(gate) and multiplies(gate, up):
        return self.down_proj(gated(gate, up, activation))  # type: ignore[no-any-return]
    return self.down_proj(self.act_fn(gate) * up)  # type: ignore[no-any-return]


def _layer(self: Any, hidden_states: Tensor, *args: Any, **given: Any) -> Tensor:
    """Compute a layer with joined launches where its parts allow it; else as the layer computes."""
    parts = projections.Layer.of(self, hidden_states) if not args and projections.serves(hidden_states) else None
    if parts is None or self.training:
        plain: Tensor = type(self).forward(self, hidden_states, *args, **given)
        return plain
    norms: list[tuple[Module, _Forward]] = [(self.input_layernorm, _unchanged), (self.post_attention_layernorm, _unchanged)]
    turn = parts.turn(self.self_attn, hidden_states, given.get("position_embeddings"))
    if turn is not None:
        given["position_embeddings"] = None, None
    with swapped([*norms, *parts.forwards(hidden_states, self.mlp, turn)], all=True):
        hidden, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **given)
        out: Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return out


def _unchanged(module: Module, x: Tensor) -> Tensor:
    return x
