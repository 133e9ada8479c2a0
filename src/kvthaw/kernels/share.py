"""Share the rows of a layer among its KV heads: keep the heaviest rows of all heads together, and none that is too light.

Heads differ: one has its mass on few tokens, another on many. With equally many rows in all, the heads' joint choice leaves
less attention unread than an equal share each. A least weight does the same over layers and steps.

Bytes and operations, 8 KV heads, 2,048 rows each: one program per sequence reads 128 KB of weights and rows and writes 64 KB. It
finds the threshold in registers, as `kvthaw.kernels.topk` does.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.bucket_topk import compact
from kvthaw.kernels.chain import dependent
from kvthaw.kernels.split import triton_block
from kvthaw.kernels.topk import MOST, PER_WARP


def definition(
    rows: Tensor, weights: Tensor, lengths: Tensor, most: int, least: float = -math.inf, whole: int = 0
) -> tuple[Tensor, Tensor]:
    """Keep the `most` heaviest rows of each sequence over all heads. Ties go to the lowest head, then to the first place.

    rows: [B, H, W] int32, ascending, -1 padded.
    weights: [B, H, W] float32, -inf without a row.
    lengths: [B] int32, the tokens of each sequence.
    least: rows of less weight go too, in sequences of more than `whole` tokens.

    Returns rows [B, H, W] of the same form and counts [B, H] int32.
    """
    order = torch.sort(weights.flatten(1), dim=1, descending=True, stable=True).indices[:, :most]
    among = torch.zeros_like(rows, dtype=torch.bool).flatten(1).scatter_(1, order, True).view_as(rows)
    keep = among & (rows >= 0) & ((weights >= least) | (lengths <= whole)[:, None, None])
    at = compact(keep, rows.shape[2])
    return torch.where(at >= 0, rows.gather(2, at.clamp(min=0).long()), -1).int(), keep.sum(dim=2).int()


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.chain import follow
    from kvthaw.kernels.topk import _bounds

    @triton.jit
    def _share(rows, weights, lengths, kept, counts, heads, width, most, least, whole, HEADS: tl.constexpr,
               WIDTH: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
        # Program: one sequence.
        follow(PDL)
        seq = tl.program_id(0).to(tl.int64)
        h, w = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
        at = (seq * heads + h) * width + w
        inside = (h < heads) & (w < width)
        row = tl.load(rows + at, mask=inside, other=-1)
        weight = tl.load(weights + at, mask=inside, other=float("-inf"))
        live = row >= 0
        bits = (weight + 0.0).to(tl.int32, bitcast=True)
        key = tl.where(live, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), -0x80000000)
        flat = tl.reshape(key, (HEADS * WIDTH,))
        want = tl.minimum(most, tl.sum(tl.reshape(live.to(tl.int32), (HEADS * WIDTH,)), axis=0))
        top = tl.max(flat, axis=0) + 1
        bottom = tl.min(tl.where(flat > -0x80000000, flat, 0x7FFFFFFF), axis=0)
        low, high, more = _bounds(flat, want, tl.maximum(tl.minimum(bottom, top), -0x7FFFFFFF), top)
        above = (flat >= high).to(tl.int32)
        same = (flat >= low).to(tl.int32) - above
        tie = tl.cumsum(same, axis=0) - same
        heavy = (weight >= least) | (tl.load(lengths + seq) <= whole)
        chosen = tl.reshape(above + same * (tie < want - more).to(tl.int32), (HEADS, WIDTH)) * heavy.to(tl.int32)
        place = tl.cumsum(chosen, axis=1) - chosen
        count = tl.sum(chosen, axis=1)
        tl.store(counts + seq * heads + tl.arange(0, HEADS), count, mask=tl.arange(0, HEADS) < heads)
        tl.store(kept + (seq * heads + h) * width + place, row, mask=chosen > 0)
        tl.store(kept + at, tl.full((HEADS, WIDTH), -1, tl.int32), mask=inside & (w >= count[:, None]))


def launch(
    rows: Tensor, weights: Tensor, lengths: Tensor, most: int, least: float = -math.inf, whole: int = 0
) -> tuple[Tensor, Tensor]:
    """Launch the Triton kernel; arguments and results as in `definition`. HEADS x WIDTH, rounded up, must be at most MOST."""
    (batch, heads, width), size = rows.shape, fits(rows)
    assert rows.is_contiguous() and weights.is_contiguous() and size <= MOST
    kept, counts = torch.empty_like(rows), torch.empty((batch, heads), dtype=torch.int32, device=rows.device)
    _share[(batch,)](
        rows, weights, lengths, kept, counts, heads, width, most, least, whole,
        HEADS=triton_block(heads), WIDTH=triton_block(width), num_warps=min(16, max(4, size // PER_WARP)), **dependent(rows.device),
    )  # fmt: skip
    return kept, counts


def fits(rows: Tensor) -> int:
    """Return how many numbers a program holds for rows [B, H, W]."""
    return triton_block(rows.shape[1]) * triton_block(rows.shape[2])


def share(
    rows: Tensor, weights: Tensor, lengths: Tensor, most: int, least: float = -math.inf, whole: int = 0
) -> tuple[Tensor, Tensor]:
    """See `definition`; torch sorts more rows than a program holds."""
    if HAS_TRITON and rows.is_cuda and fits(rows) <= MOST:
        return launch(rows, weights, lengths, most, least, whole)
    return definition(rows, weights, lengths, most, least, whole)
