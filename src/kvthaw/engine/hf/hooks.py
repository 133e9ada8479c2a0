"""Hooks into a model for methods that need more than q, k and v: its rotary embedding, and a prediction of the next layer's
query."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear
from transformers import PreTrainedModel

from kvthaw.cache.index_api import Rotary
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.engine.hf.fused import swapped
from kvthaw.engine.hf.layer import CacheLayer, QueryAskedError
from kvthaw.errors import UnsupportedModelError


def rotary(model: PreTrainedModel, kind: str) -> Rotary | None:
    """Return the rotary embedding of a model's layers of one kind (from its config's layer_types); None if it has none."""
    found = [m for name, m in model.get_decoder().named_modules() if name.rpartition(".")[2] == "rotary_emb"]
    if not found:
        return None
    module = found[0]
    apply = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    if apply is None or [*inspect.signature(apply).parameters][:4] != ["q", "k", "cos", "sin"]:
        raise UnsupportedModelError(
            f"{type(model).__name__} applies rotary positions to its keys in a way that kvthaw cannot undo"
        )
    kinds = (kind,) if "layer_type" in inspect.signature(module.forward).parameters else ()

    def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = module(torch.empty(0, dtype=model.dtype, device=positions.device), positions, *kinds)
        return cos, sin

    return Rotary(angles, apply)


def turns_by_length(model: PreTrainedModel) -> str | None:
    """Return the kind of rotary positions if they depend on the longest row of a forward ("dynamic", "longrope"), else None."""
    rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    kinds = [str(each.get("rope_type")) for each in (rope, *rope.values()) if isinstance(each, dict)]
    return next((kind for kind in kinds if kind in ("dynamic", "longrope")), None)


def prefetch(module: torch.nn.Module) -> None:
    """Predict the next layer's query before this attention module runs."""
    if _prefetch not in module._forward_pre_hooks.values():  # a copied module has its own
        module.register_forward_pre_hook(_prefetch, with_kwargs=True)


def drop_hooks(modules: Iterable[torch.nn.Module]) -> None:
    """Remove the hooks of modules."""
    for module in modules:
        for number, hook in list(module._forward_pre_hooks.items()):
            if hook is _prefetch:
                del module._forward_pre_hooks[number]
                module._forward_pre_hooks_with_kwargs.pop(number, None)


def _unread(module: Linear, x: Tensor) -> Tensor:
    """Stand for a projection whose result is not read."""
    return x.new_empty((*x.shape[:-1], module.out_features))


def _query(attention: torch.nn.Module, given: Mapping[str, Any]) -> Tensor:
    """Return the query that an attention module computes, [B, Hq, T, D], for arguments as its forward takes them."""
    parts = (getattr(attention, name, None) for name in ("k_proj", "v_proj"))
    unread: list[tuple[torch.nn.Module, Callable[..., Any]]] = [(part, _unread) for part in parts if isinstance(part, Linear)]
    try:
        with torch.no_grad(), swapped(unread, all=True):
            attention(**given, kvthaw_asked=True)
    except QueryAskedError as asked:
        return asked.query
    raise UnsupportedModelError(f"{type(attention).__name__} cannot be asked what its query would be")


def _prefetch(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Predict, before a layer's attention runs, the next layer's query from this layer's input, and search the next layer's
    index with it.

    The model's first layer predicts nothing, as in InfiniGen's code: its attention sees only the token's embedding. Layers
    that keep a window are skipped, because their inputs include other rotary angles.
    """
    for name, given in kwargs.items():
        every = [layer for layer in getattr(given, "layers", []) if isinstance(layer, CacheLayer)]
        ours = [layer for layer in every if layer.kv.keeps_all]
        if not ours or not ours[0].shared.kv.settings.method.prefetches:
            continue
        at = next((i for i, layer in enumerate(ours) if layer.module is not None and layer.module() is module), len(ours))
        prefetches = at + 1 < len(ours) and ours[at] is not given.layers[0]
        kv, following = (ours[at + 1].kv, ours[at + 1].module) if prefetches else (None, None)
        hidden = args[0] if args else kwargs["hidden_states"]
        attention = None if following is None else following()
        updater = kv.updater if isinstance(kv, OffloadedLayer) and kv.sequences.decodes(hidden.shape[1]) else None
        if attention is None or updater is None:
            continue
        updater.predict(_query(attention, {**kwargs, name: None, **({"hidden_states": hidden} if args else {})}))
