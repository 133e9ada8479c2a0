"""kvthaw's attention as an operator that torch.compile understands, so that the model around it becomes one graph.

A compiled forward knows a layer only by its number, so that it serves every cache. `serving` sets the cache that it serves
now.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import torch
from torch import Tensor

from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.layer_base import AttentionParams
from kvthaw.errors import CacheError

_SERVED: ContextVar[KVCache | None] = ContextVar("kvthaw_served", default=None)


@contextmanager
def serving(cache: KVCache) -> Iterator[None]:
    """Context in which compiled forwards attend to this cache."""
    token = _SERVED.set(cache)
    try:
        yield
    finally:
        _SERVED.reset(token)


def serves(cache: KVCache) -> bool:
    """Return whether a step of this cache's graph runner is running. It passes no mask, because the layers know their padding."""
    return _SERVED.get() is cache


def register() -> None:
    """Register kvthaw's operators, once per process and not before they are needed."""
    if not hasattr(torch.ops.kvthaw, "attend"):
        torch.library.custom_op("kvthaw::attend", _attend, mutates_args=()).register_fake(_like_first)
        torch.library.custom_op("kvthaw::choose_early", _choose_early, mutates_args=()).register_fake(_like_first)
        torch.library.custom_op("kvthaw::all_reduce", _all_reduce, mutates_args=()).register_fake(_like)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Store new tokens of a layer in the served cache, and attend with them. Returns [B, Hq, T, D].

    key, value: [B, H, T, D].
    """
    cache = _SERVED.get()
    if cache is None:
        raise CacheError(
            "the model or a module of it was compiled by torch.compile, which hides kvthaw's cache from it; "
            "leave it uncompiled and attach(compile=True)"
        )
    return cache.attend(cache.layers[layer], query, key, value, AttentionParams(scale, softcap, sinks)).contiguous()


def _like_first(first: Tensor, *rest: object) -> Tensor:
    return torch.empty_like(first, memory_format=torch.contiguous_format)


def _choose_early(hidden: Tensor, cos: Tensor, sin: Tensor, layer: int) -> Tensor:
    """Choose rows of a layer of the served cache while the layer before computes its MLP.

    hidden: the residual stream before that MLP, [B, 1, hidden].
    cos, sin: the rotary embedding of the token.

    Returns a copy of hidden, which the MLP reads, so that this comes first. The compiled graph may write over all that it gave,
    so the side stream reads copies of its own.
    """
    cache = _SERVED.get()
    if cache is None or cache.predict is None or cache.settings.method.prefetches != "mlp":
        return hidden.clone()
    given = hidden, hidden, cos, sin
    copy, *mine = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in given]
    torch._foreach_copy_([copy, *mine], given)
    cache.choose_early(layer, hidden.shape[1], partial(cache.predict, layer, *mine), *mine)
    return copy


def _all_reduce(x: Tensor, buffer: Tensor, group: str) -> Tensor:
    """Return the sum of all processes' x, through a buffer that the GPUs read from each other during the call."""
    total: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(buffer[: x.numel()].view_as(x), x, "sum", group)
    return total


def _like(x: Tensor, buffer: Tensor, group: str) -> Tensor:
    return torch.empty_like(x)
