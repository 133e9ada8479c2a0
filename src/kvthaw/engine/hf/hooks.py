"""Hooks into a model for methods that need more than q, k and v: its rotary embedding, and a prediction of the next layer's
query."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear
from transformers import PreTrainedModel

from kvthaw.cache.index_api import Rotary
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.engine.hf.cache_argument import CACHE
from kvthaw.engine.hf.fused import swapped
from kvthaw.engine.hf.layer import CacheLayer, QueryAskedError
from kvthaw.engine.hf.one_token import InputUnread
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
            if hook is _prefetch or isinstance(hook, (_BeforeAttention, _BeforeMLP)):
                del module._forward_pre_hooks[number]
                module._forward_pre_hooks_with_kwargs.pop(number, None)


class _Seen:
    """What the attention module that ran last was given, for the hook before the MLP of its layer.

    turn: its rotary cos and sin.
    cache: its cache, which a model must not keep.
    """

    turn: tuple[Tensor, Tensor] | None = None
    cache: weakref.ref[Any] | None = None


class _BeforeAttention(InputUnread):
    """A hook that keeps what an attention module is given."""

    def __init__(self, seen: _Seen) -> None:
        self.seen = seen

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.seen.turn = kwargs["position_embeddings"]
        cache = kwargs.get(CACHE)
        self.seen.cache = None if cache is None else weakref.ref(cache)


class _BeforeMLP:
    """A hook before the norm of a layer's MLP. Its input is the residual stream, from which it predicts the next layer's query.

    norm, attention: the next layer's modules.
    """

    def __init__(self, seen: _Seen, norm: torch.nn.Module, attention: Any) -> None:
        self.seen, self.norm, self.attention = seen, norm, attention
        self.number: int = attention.layer_idx

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        turn, self.seen.turn = self.seen.turn, None
        if turn is None:
            return
        hidden = args[0]
        layers = getattr(self.seen.cache and self.seen.cache(), "layers", ())
        kv = next((layer.shared.kv for layer in layers if isinstance(layer, CacheLayer)), None)
        if kv is not None and kv.settings.method.prefetches == "mlp":
            kv.choose_early(self.number, hidden.shape[1], partial(self.predict, hidden, *turn), hidden, *turn)

    def predict(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the next layer's query, [B, Hq, T, D], for a residual stream [B, T, hidden]."""
        return _query(
            self.attention, {"hidden_states": self.norm(hidden), "position_embeddings": (cos, sin), "attention_mask": None}
        )


def choose_early(model: PreTrainedModel) -> None:
    """Hook a model so that layers choose rows while the layer before computes its MLP.

    The first two layers keep their own queries: the residual stream is little more than the token's embedding there.

    Raises UnsupportedModelError for a model whose residual stream cannot be read.
    """
    if not _hooks(model):
        seen = _Seen()
        for layer, norm, following in _pairs(model):
            layer.self_attn.register_forward_pre_hook(_BeforeAttention(seen), with_kwargs=True)
            norm.register_forward_pre_hook(_BeforeMLP(seen, following.input_layernorm, following.self_attn))
    if not _hooks(model) and model.config.get_text_config(decoder=True).num_hidden_layers > 2:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no two neighbouring layers whose attention takes one cos and sin and nothing more, and "
            "whose normed MLP follows it on a residual stream; prefetch must be False"
        )


def _hooks(model: PreTrainedModel) -> dict[int, _BeforeMLP]:
    """Return a model's hooks by the number of the layer whose query they predict."""
    norms = (_mlp_norm(layer) for layer in getattr(model.get_decoder(), "layers", ()))
    hooks = (hook for norm in norms if norm is not None for hook in norm._forward_pre_hooks.values())
    return {hook.number: hook for hook in hooks if isinstance(hook, _BeforeMLP)}


def _mlp_norm(layer: torch.nn.Module) -> torch.nn.Module | None:
    """Return the norm of a layer's MLP; None if it has none of a known name."""
    return getattr(layer, "pre_feedforward_layernorm", None) or getattr(layer, "post_attention_layernorm", None)


def _pairs(model: PreTrainedModel) -> Iterator[tuple[Any, torch.nn.Module, Any]]:
    """Return layers from the second on, the norm of each one's MLP, and the layer that follows, where all is known of both."""
    layers = list(getattr(model.get_decoder(), "layers", ()))
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None)
    rotary_of = getattr(model.get_decoder(), "rotary_emb", None)
    by_kind = rotary_of is not None and "layer_type" in inspect.signature(rotary_of.forward).parameters
    for number, (layer, following) in enumerate(pairwise(layers)):
        norm, read = _mlp_norm(layer), getattr(following, "input_layernorm", None)
        asked = _turned(getattr(layer, "self_attn", None)) and _turned(getattr(following, "self_attn", None))
        same = not by_kind or kinds is None or kinds[number] == kinds[number + 1]
        if number > 0 and asked and same and norm is not None and isinstance(read, torch.nn.Module):
            yield layer, norm, following


def _turned(attention: torch.nn.Module | None) -> bool:
    """Return whether an attention module needs cos and sin besides its input, and nothing more."""
    if attention is None:
        return False
    taken = inspect.signature(attention.forward).parameters
    needed = {name for name, one in taken.items() if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD}
    return "position_embeddings" in taken and needed <= {"hidden_states", "position_embeddings", "attention_mask"}


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
        if not ours or ours[0].shared.kv.settings.method.prefetches != "attention":
            continue
        at = next((i for i, layer in enumerate(ours) if layer.module is not None and layer.module() is module), len(ours))
        prefetches = at + 1 < len(ours) and ours[at] is not given.layers[0]
        kv, following = (ours[at + 1].kv, ours[at + 1].module) if prefetches else (None, None)
        hidden = args[0] if args else kwargs["hidden_states"]
        attention = None if following is None else following()
        ahead = kv.ahead(hidden.shape[1]) if isinstance(kv, OffloadedLayer) else None
        if attention is None or ahead is None:
            continue
        ahead.prefetch(_query(attention, {**kwargs, name: None, **({"hidden_states": hidden} if args else {})}))
