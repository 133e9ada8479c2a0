"""One decode step of attention over the keys that lie on the device: a slab's sink, ring and selected rows, or all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.flash_decode import definition, flash_decode
from kvthaw.kernels.places import Newest, place_of, seen_places, write
from kvthaw.regions import Regions
from kvthaw.types import Partial


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
    every = False
    if regions is None and lengths is not None:  # no further than the longest lane
        ends, begins = lengths.tolist(), [0] if starts is None else starts.tolist()
        keys, values = keys[:, :, : max(ends)], values[:, :, : max(ends)]
        visible = None if visible is None else visible[:, :, : max(ends)]
        log_weight = None if log_weight is None else log_weight[:, :, : max(ends)]
        every = visible is None and min(ends) == max(ends) and max(begins) <= 0
    if softcap is not None or sinks is not None or log_weight is not None or partials:
        return definition(
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
        ).out.to(query.dtype)
    if newest is not None:
        assert lengths is not None
        write(keys, values, newest, place_of(lengths, regions))
    seen = None if every else seen_places(keys, visible, lengths, starts, regions, newest is not None)
    folded = query.reshape(query.shape[0], keys.shape[1], -1, query.shape[2])
    mask = None if seen is None else seen[:, :, None]
    return F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale).reshape(query.shape)
