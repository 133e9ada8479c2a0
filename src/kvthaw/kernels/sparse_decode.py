"""One decode step of attention over the keys on the device: sink, ring and selected rows of a slab, or all keys."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.decode_step import AnyOrder, DecodeStep, Places, TokenOrder
from kvthaw.kernels.flash_decode import definition, flash_decode
from kvthaw.kernels.in_place import InPlace


def sparse_decode(step: DecodeStep, places: Places | InPlace, tickets: Tensor | None = None) -> Tensor:
    """Attend with one query per head, [B, Hq, D] in the dtype of query: `flash_decode` on a GPU, torch elsewhere.

    Writes the newest token to its slot first.
    tickets: see `flash_decode`. On the CPU, slots that are not attended must be finite, except those outside a sequence's
        range if places are TokenOrder without `visible`.
    """
    if step.query.device.type == "cuda" and HAS_TRITON:
        return flash_decode(step, places, tickets)
    if tickets is not None and not isinstance(places, AnyOrder) and places.newest is not None:
        finite = torch.isfinite(places.newest[0]) & torch.isfinite(places.newest[1])
        tickets[: len(finite), 0] |= ~(finite.all(dim=(1, 2)) | (places.lengths <= 0))
    if isinstance(places, InPlace):
        keys, values, places = places.copied(step.keys, step.values)
        step = replace(step, keys=keys, values=values)
    elif isinstance(places, TokenOrder):  # up to the longest sequence
        most = max(0, int(places.lengths.max()))
        weight = None if step.log_weight is None else step.log_weight[:, :, :most]
        step = replace(step, keys=step.keys[:, :, :most], values=step.values[:, :, :most], log_weight=weight)
        places = replace(places, visible=None if places.visible is None else places.visible[:, :, :most])
    if step.softcap is not None or step.sinks is not None or step.log_weight is not None or step.partials:
        return definition(step, places).out.to(step.query.dtype)
    places.write(step.keys, step.values)
    folded = step.query.unflatten(1, (step.keys.shape[1], -1))
    if not isinstance(places, TokenOrder) or places.visible is not None:
        mask = places.seen(step.keys)[:, :, None]
        return F.scaled_dot_product_attention(folded, step.keys, step.values, attn_mask=mask, scale=step.scale).flatten(1, 2)
    out = torch.zeros_like(folded)
    for seqs, begin, end in places.runs():
        rows = step.keys[seqs, :, begin:end], step.values[seqs, :, begin:end]
        out[seqs] = F.scaled_dot_product_attention(folded[seqs], *rows, scale=step.scale)
    return out.flatten(1, 2)
