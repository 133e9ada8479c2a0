"""One decode step of attention over the keys on the device: sink, ring and selected rows of a slab, or all keys."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.decode_step import DecodeStep
from kvthaw.kernels.flash_decode import definition, flash_decode


def sparse_decode(step: DecodeStep, tickets: Tensor | None = None) -> Tensor:
    """Attend with one query per head, [B, Hq, D] in the dtype of query: `flash_decode` on a GPU, torch elsewhere.

    Writes the newest token to its slot first.
    tickets: see `flash_decode`. On the CPU, slots that are not attended must be finite.
    """
    if step.query.device.type == "cuda" and HAS_TRITON:
        return flash_decode(step, tickets)
    if tickets is not None and step.newest is not None:
        assert step.lengths is not None
        finite = torch.isfinite(step.newest[0]) & torch.isfinite(step.newest[1])
        tickets[0] |= ~(finite.all(dim=(1, 2)) | (step.lengths <= 0)).all()
    if step.selected is not None:
        assert step.regions is not None
        assert step.starts is not None
        step.write_newest()
        selected = step.selected.listed(step.keys.shape[1], step.regions.sink, step.starts)
        assert selected.rows is not None
        keys, values = selected.gather(step.keys, step.values, step.regions.held)
        step = replace(step, keys=keys, values=values, selected=None, visible=selected.rows >= 0)
    every = False
    if step.regions is None and step.lengths is not None:  # up to the longest sequence
        ends, begins = step.lengths.tolist(), [0] if step.starts is None else step.starts.tolist()
        every = step.visible is None and min(ends) == max(ends) and max(begins) <= 0
        step = replace(
            step,
            keys=step.keys[:, :, : max(ends)],
            values=step.values[:, :, : max(ends)],
            visible=None if step.visible is None else step.visible[:, :, : max(ends)],
            log_weight=None if step.log_weight is None else step.log_weight[:, :, : max(ends)],
        )
    if step.softcap is not None or step.sinks is not None or step.log_weight is not None or step.partials:
        return definition(step).out.to(step.query.dtype)
    step.write_newest()
    mask = None if every else step.seen()[:, :, None]
    folded = step.query.unflatten(1, (step.keys.shape[1], -1))
    return F.scaled_dot_product_attention(folded, step.keys, step.values, attn_mask=mask, scale=step.scale).flatten(1, 2)
