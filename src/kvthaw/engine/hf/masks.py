"""Masks in transformers' forms, and attention with any of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from kvthaw.cache.layer_base import AttentionParams
from kvthaw.errors import CacheError, UnsupportedModelError
from kvthaw.kernels.dense import QUERIES, masked_attention

_HIDES = -10000.0  # a mask value this low leaves no weight


def is_padding(mask: Tensor) -> bool:
    """Return whether a mask has one row for all queries, [B, 1, 1, N] bool, as padding_mask() makes it."""
    return mask.ndim == 4 and mask.shape[2] == 1 and mask.dtype == torch.bool


def as_bool(mask: Tensor) -> Tensor:
    """Return a 4-D mask of 0 and -inf, or of numbers that hide as surely, as bools; any other mask unchanged."""
    if mask.ndim != 4 or not mask.is_floating_point():
        return mask
    shown = mask == 0
    return shown if bool((shown | (mask <= _HIDES)).all()) else mask


def causal_mask(padding: Tensor, steps: int) -> Tensor:
    """Return the causal bool mask [B, 1, steps, n] of the last `steps` of n tokens, whose padding mask is [B, 1, 1, n]."""
    n = padding.shape[3]
    causal = torch.ones(steps, n, dtype=torch.bool, device=padding.device).tril(n - steps)
    return causal[None, None] & padding


def attention_by_mask(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, params: AttentionParams) -> Tensor:
    """Attend by any bool mask [B, 1, T, n], with softcap and sinks. Returns [B, Hq, T, D], 0 where a query sees nothing."""
    return masked_attention(query, key, value, mask, scale=params.scale, softcap=params.softcap, sinks=params.sinks)


@dataclass(frozen=True)
class LocalMask:
    """The mask of queries that attend to few tokens each. It passes through the model instead of a tensor [B, 1, T, n].

    It is evaluated per block of queries and the tokens that they may attend to, so time and memory are linear in the
    prompt.

    make: transformers' function that makes masks, with the arguments that all blocks share.
    queries: positions of the queries.
    start: position of the first key.
    size: tokens that a query may attend to, itself included.
    """

    make: Callable[..., Tensor]
    queries: range
    start: int
    size: int

    @cached_property
    def blocks(self) -> list[tuple[int, Tensor]]:
        """The first key and the mask of each block of queries. The layers of a forward share them."""
        ends = [(a, min(a + QUERIES, self.queries.stop)) for a in self.queries[::QUERIES]]
        return [self.between(max(self.start, a - self.size + 1), a, b) for a, b in ends]

    def between(self, first: int, a: int, b: int) -> tuple[int, Tensor]:
        """Return the offset of the first key, and the mask of queries a .. b for the keys from position `first` on."""
        mask = self.make(q_length=b - a, q_offset=a, kv_length=b - first, kv_offset=first, allow_is_causal_skip=False)
        return first - self.start, mask

    def __getitem__(self, at: tuple[slice, ...]) -> LocalMask:
        """Return the mask of some queries: Gemma 4 drops queries whose logits are not needed."""
        return replace(self, queries=self.queries[at[2]])

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, params: AttentionParams) -> Tensor:
        """Return the attention output [B, Hq, T, D], 0 where a query sees nothing."""
        if (have := keys.shape[2]) != (told := self.queries.stop - self.start):
            raise UnsupportedModelError(
                f"a layer attends to {have} tokens by a mask of {told}: the model changes keys after caching"
            )
        parts = []
        for q, (first, mask) in zip(query.split(QUERIES, dim=2), self.blocks, strict=True):
            k, v = (x[:, :, first : first + mask.shape[3]] for x in (keys, values))
            parts.append(attention_by_mask(q, k, v, mask, params))
        return torch.cat(parts, dim=2)


def padding_mask(*, mask_function: Callable[..., Any] = causal_mask_function, **kwargs: Any) -> Tensor | LocalMask | None:
    """Make the mask of a layer, as transformers' AttentionMaskInterface requires.

    Plain causal layers get the padding mask [B, 1, 1, n]: no sync, no [q, n] tensor. Layers that attend only to recent
    tokens get a LocalMask if they leave tokens out. Others get sdpa's [B, 1, q, n].
    """
    if mask_function is causal_mask_function:
        mask: Tensor | None = kwargs.get("attention_mask")
        return None if mask is None else mask[:, None, None]
    size = (
        kwargs.get("local_size") if kwargs.get("allow_is_causal_skip") else None
    )  # else images or packed texts change the mask
    if size is not None and kwargs["q_length"] > 1 and kwargs["kv_length"] > size:
        first, start = kwargs["q_offset"], kwargs["kv_offset"]
        queries = range(first, first + kwargs["q_length"])
        if queries.stop == start + kwargs["kv_length"]:
            shared = {name: kwargs[name] for name in ("batch_size", "attention_mask", "device")}
            return LocalMask(partial(sdpa_mask, mask_function=mask_function, **shared), queries, start, size)
    full: Tensor | None = sdpa_mask(mask_function=mask_function, **kwargs)
    return full


def dense_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | LocalMask | None,
    params: AttentionParams,
    dropout: float,
    causal: bool | None,
) -> Tensor:
    """Attend to the keys and values of another cache, or of none. Returns [B, T, Hq, D]."""
    if isinstance(mask, LocalMask):
        if not dropout:
            return mask.attend(query, key, value, params).transpose(1, 2).contiguous()
        _, mask = mask.between(mask.start, mask.queries.start, mask.queries.stop)
    plain = params.softcap is None and params.sinks is None
    if mask is not None and not plain:
        mask = as_bool(mask)
        if mask.dtype != torch.bool:
            raise CacheError(
                f"attention_mask is {mask.dtype} and adds numbers to scores; {type(module).__name__} takes masks of bools, or of 0 "
                "and -inf"
            )
    if mask is not None and is_padding(mask):
        mask = causal_mask(mask[..., -key.shape[2] :], query.shape[2])
    continued = 1 < query.shape[2] < key.shape[2] and (getattr(module, "is_causal", True) if causal is None else causal)
    if mask is None and (continued or not plain):
        mask = causal_mask(query.new_ones((1, 1, 1, key.shape[2]), dtype=torch.bool), query.shape[2])
    if mask is not None and not plain:
        return attention_by_mask(query, key, value, mask, params).transpose(1, 2).contiguous()
    out: Tensor = sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=params.scale, is_causal=causal
    )[0]
    return out
