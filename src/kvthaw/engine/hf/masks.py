"""Masks as transformers makes them, and attention by any of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from kvthaw.cache.layer_base import AttentionParams
from kvthaw.kernels.dense import masked_attention


def is_padding(mask: Tensor) -> bool:
    """Return whether a mask is one for all queries, as _mask() makes it."""
    return mask.ndim == 4 and mask.shape[2] == 1 and mask.dtype == torch.bool


def causal_mask(padding: Tensor, steps: int) -> Tensor:
    """Return the causal bool mask [B, 1, steps, n] of the last `steps` of n tokens, whose padding mask is [B, 1, 1, n]."""
    n = padding.shape[3]
    causal = torch.ones(steps, n, dtype=torch.bool, device=padding.device).tril(n - steps)
    return causal[None, None] & padding


def attention_by_mask(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, params: AttentionParams) -> Tensor:
    """Attend by any bool mask [B, 1, T, n], with softcap and sinks. Returns [B, Hq, T, D], 0 where a query sees nothing."""
    return masked_attention(query, key, value, mask, scale=params.scale, softcap=params.softcap, sinks=params.sinks)


def padding_mask(*args: Any, mask_function: Callable[..., Any] = causal_mask_function, **kwargs: Any) -> Tensor | None:
    """Plain causal layers get the padding mask as [B, 1, 1, n]: no sync, no [q, n] tensor. Others get sdpa's [B, 1, q, n]."""
    if mask_function is causal_mask_function:
        mask: Tensor | None = kwargs.get("attention_mask")
        return None if mask is None else mask[:, None, None]
    full: Tensor | None = sdpa_mask(*args, mask_function=mask_function, **kwargs)
    return full


def dense_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    params: AttentionParams,
    dropout: float,
    causal: bool | None,
) -> Tensor:
    """Attend to the keys and values of another cache, or of none. Returns [B, T, Hq, D]."""
    if mask is not None and is_padding(mask):
        mask = causal_mask(mask[..., -key.shape[2] :], query.shape[2])
    continued = 1 < query.shape[2] < key.shape[2] and (getattr(module, "is_causal", True) if causal is None else causal)
    plain = params.softcap is None and params.sinks is None
    if mask is None and (continued or not plain):
        mask = causal_mask(query.new_ones((1, 1, 1, key.shape[2]), dtype=torch.bool), query.shape[2])
    if not plain:
        assert mask is not None
        return attention_by_mask(query, key, value, mask, params).transpose(1, 2).contiguous()
    out: Tensor = sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=params.scale, is_causal=causal
    )[0]
    return out
