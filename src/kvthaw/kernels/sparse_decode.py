"""One decode step of attention over the keys that lie on the device: a slab's sink, ring and selected rows, or all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.flash_decode import flash_decode
from kvthaw.kernels.merge import merge
from kvthaw.kernels.places import Newest, place_of, seen_places, write
from kvthaw.regions import Regions
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
    *,
    scale: float,
    newest: Newest | None = None,
    visible: Tensor | None = None,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    regions: Regions | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    log_weight: Tensor | None = None,
    partials: Sequence[Partial] = (),
    tickets: Tensor | None = None,
) -> Tensor:
    """Attention of one query a head, [B, Hq, D] in the dtype of query: `flash_decode` on a GPU, torch elsewhere.

    Arguments as for `kvthaw.kernels.flash_decode.definition`: newest is written to its place first. Off the GPU what cannot be seen
    must be finite; a slab is.
    """
    if query.device.type == "cuda" and HAS_TRITON:
        return flash_decode(
            query,
            keys,
            values,
            scale=scale,
            newest=newest,
            visible=visible,
            lengths=lengths,
            starts=starts,
            regions=regions,
            softcap=softcap,
            sinks=sinks,
            log_weight=log_weight,
            partials=partials,
            tickets=tickets,
        )
    if newest is not None:
        assert lengths is not None
        write(keys, values, newest, place_of(lengths, regions))
    every = False
    if regions is None and lengths is not None:  # no further than the longest lane
        ends, begins = lengths.tolist(), [0] if starts is None else starts.tolist()
        keys, values = keys[:, :, : max(ends)], values[:, :, : max(ends)]
        visible = None if visible is None else visible[:, :, : max(ends)]
        log_weight = None if log_weight is None else log_weight[:, :, : max(ends)]
        every = visible is None and min(ends) == max(ends) and max(begins) <= 0
    plain = softcap is None and sinks is None and log_weight is None and not partials
    seen = None if every and plain else seen_places(keys, visible, lengths, starts, regions, newest is not None)
    if plain:
        folded = query.reshape(query.shape[0], keys.shape[1], -1, query.shape[2])
        mask = None if seen is None else seen[:, :, None]
        return F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale).reshape(query.shape)
    assert seen is not None
    parts = [definition(query, keys, values, seen, scale=scale, softcap=softcap, log_weight=log_weight), *partials]
    if sinks is not None:
        none = torch.zeros_like(parts[0].out)
        parts.append(Partial(none, sinks.float().to(query.device).expand(query.shape[:2])))
    out, _ = merge([p.out for p in parts], [p.lse for p in parts])
    return out.to(query.dtype)
