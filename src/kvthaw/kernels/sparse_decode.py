"""One decode step of attention over the keys that lie on the device: sink, ring and the selected rows of the pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.flash_decode import flash_decode
from kvthaw.kernels.merge import merge
from kvthaw.types import Partial


def definition(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    log_weight: Tensor | None = None,
) -> Partial:
    """softmax over the visible keys, in float32.

    query [B, Hq, D]; keys, values [B, H, N, D]; visible [B, H, N] bool; log_weight [B, Hq, N] is added to the logits.
    Invisible keys and values may hold anything, NaN included. A head that sees nothing gives 0 with lse -inf.
    """
    batch, heads, _, dim = keys.shape
    hidden = ~visible[:, :, None]
    grouped = query.float().reshape(batch, heads, -1, dim)
    scores = torch.einsum("bhgd,bhnd->bhgn", grouped, keys.float()) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if log_weight is not None:
        scores = scores + log_weight.reshape(scores.shape)
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    clean = torch.where(visible[..., None], values.float(), 0.0)
    out = torch.einsum("bhgn,bhnd->bhgd", weights, clean)
    return Partial(out.reshape(query.shape), lse.reshape(query.shape[:2]))


def sparse_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    log_weight: Tensor | None = None,
    partials: Sequence[Partial] = (),
) -> Tensor:
    """Attention of one query a head, [B, Hq, D] in the dtype of query. Arguments as in `definition`.

    sinks [Hq]: learned logits that take weight and give nothing (gpt-oss). partials: attention over further, disjoint tokens.
    The keys and values of invisible places must be finite here; the pool keeps them so.
    """
    if query.device.type == "cuda" and HAS_TRITON:
        return flash_decode(
            query,
            keys,
            values,
            scale=scale,
            visible=visible,
            softcap=softcap,
            sinks=sinks,
            log_weight=log_weight,
            partials=partials,
        )
    if softcap is None and sinks is None and log_weight is None and not partials:
        folded = query.reshape(query.shape[0], keys.shape[1], -1, query.shape[2])
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=visible[:, :, None], scale=scale)
        return out.reshape(query.shape)
    parts = [definition(query, keys, values, visible, scale=scale, softcap=softcap, log_weight=log_weight), *partials]
    if sinks is not None:
        none = torch.zeros_like(parts[0].out)
        parts.append(Partial(none, sinks.float().to(query.device).expand(query.shape[:2])))
    out, _ = merge([p.out for p in parts], [p.lse for p in parts])
    return out.to(query.dtype)
