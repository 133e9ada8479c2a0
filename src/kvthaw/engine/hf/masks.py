"""Masks in transformers' forms, and attention with any of them."""

from __future__ import annotations

import weakref
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


class Masks:
    """Read the model's masks, each of them once."""

    def __init__(self) -> None:
        self._mask: weakref.ref[Tensor] | None = None  # the mask that was read last
        self._read: tuple[list[int], bool] = [], False
        self._read_step = False  # a single token's mask was read since the last prompt

    def read(self, mask: Tensor, known: list[int], before: int, steps: int) -> tuple[list[int], bool]:
        """Check the model's mask for `steps` tokens after `before` tokens.

        Returns the left padding of each row, and whether the mask differs from causal attention. On a GPU reading a mask
        waits for the device, so a single token's mask is read only at the first step after a prompt. Its size is always
        checked. Raises CacheError for a mask of other rows or tokens, or one that hides more than left padding.

        known: the left padding of each row as the cache knows it.
        """
        if mask.ndim != 4 or mask.dtype != torch.bool:
            raise CacheError(
                f"attention_mask is {mask.dtype} of shape {list(mask.shape)}; kvthaw takes the 2-D mask of the padding, or a 4-D "
                "one of bools or of 0 and -inf"
            )
        if mask.shape[0] != len(known):
            raise CacheError(f"attention_mask has {mask.shape[0]} rows; the tokens have {len(known)}")
        if mask.shape[3] != before + steps:
            raise CacheError(
                f"attention_mask covers {mask.shape[3]} tokens; it must cover the {before} in the cache and {steps} new ones"
            )
        if mask.is_cuda and steps == 1 and self._read_step and before not in known:
            return known, False
        self._read_step = steps == 1
        if self._mask is None or self._mask() is not mask:
            self._read, self._mask = _said(mask, before, steps), weakref.ref(mask)
        pads, own = self._read
        for row, (had, now) in enumerate(zip(known, pads, strict=True)):
            if now != had and had < before:
                raise CacheError(f"attention_mask hides {now} tokens of row {row}; the cache knows {had} as padding")
        return list(pads), own


def _said(mask: Tensor, before: int, steps: int) -> tuple[list[int], bool]:
    """Return each row's left padding by a mask [B, 1, 1 or T, n], and whether the mask is not causal."""
    seen = mask[:, 0, -1]  # by the last query
    padding = is_padding(mask)
    if bool((seen[:, :-1] & ~seen[:, 1:]).any()) or not (padding or bool((mask[:, 0] <= seen[:, -steps:, None]).all())):
        raise CacheError("attention_mask hides tokens after visible ones; kvthaw takes padding on the left only")
    pads: list[int] = (seen.shape[1] - seen.sum(dim=1)).tolist()
    if padding or torch.equal(mask, causal_mask(mask[:, :, -1:], steps)):
        return pads, False
    if before:
        raise CacheError(
            "attention_mask is every query's own, as where tokens of an image attend both ways; kvthaw takes such tokens with "
            "the first prompt, in one pass"
        )
    return pads, True


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
