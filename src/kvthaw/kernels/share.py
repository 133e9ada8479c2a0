"""Share the rows of a layer among its KV heads: keep the heaviest rows of all heads together.

Heads differ: one has its mass on few tokens, another on many. With equally many rows in all, the heads' joint choice leaves
less attention unread than an equal share each.

Weights are logarithms. Two that fall into one of BINS bins, 1/64 apart, count as equal: rows then differ by at most 1.6 % in
weight, and a histogram finds the threshold.

Bytes and operations, 8 KV heads, 2,048 rows each: two launches of 8 programs a sequence. Each program of the first reads its
head's 16 KB of rows and weights, and writes a histogram of 4 KB. Each of the second reads the 8 histograms and its own 16 KB, and
writes 8 KB. A single program that found the exact threshold of all 16,384 weights took 46 us on an H100.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.bucket_topk import compact
from kvthaw.kernels.chain import dependent
from kvthaw.kernels.split import triton_block
from kvthaw.kernels.topk import MOST, PER_WARP

BINS = 1024
_PER_UNIT, _LOWEST = 64.0, -14.0  # bins from the logarithm -14 to 2; lighter and heavier weights are in the outer ones


def definition(rows: Tensor, weights: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Keep `most` rows of each sequence over all heads, of the heaviest bins. In one bin the lowest heads go first, then the first
    places.

    rows: [B, H, W] int32, ascending, -1 padded.
    weights: [B, H, W] float32, logarithms, -inf without a row.

    Returns rows [B, H, W] of the same form and counts [B, H] int32.
    """
    bins = ((weights - _LOWEST) * _PER_UNIT).clamp(0, BINS - 1).int().masked_fill(rows < 0, -1)
    order = torch.sort(bins.flatten(1), dim=1, descending=True, stable=True).indices[:, :most]
    among = torch.zeros_like(rows, dtype=torch.bool).flatten(1).scatter_(1, order, True).view_as(rows)
    keep = among & (rows >= 0)
    at = compact(keep, rows.shape[2])
    return torch.where(at >= 0, rows.gather(2, at.clamp(min=0).long()), -1).int(), keep.sum(dim=2).int()


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.chain import follow

    @triton.jit
    def _own(rows, weights, pair, width, WIDTH: tl.constexpr, BINS: tl.constexpr, LOWEST: tl.constexpr, PER_UNIT: tl.constexpr):
        # Load a head's rows and the bins of their weights, -1 where there is no row.
        w = tl.arange(0, WIDTH)
        row = tl.load(rows + pair * width + w, mask=w < width, other=-1)
        weight = tl.load(weights + pair * width + w, mask=w < width, other=float("-inf"))
        bin = tl.minimum(tl.maximum((weight - LOWEST) * PER_UNIT, 0.0), BINS - 1.0).to(tl.int32)
        return row, tl.where(row >= 0, bin, -1)

    @triton.jit
    def _count_weights(rows, weights, counted, width, WIDTH: tl.constexpr, BINS: tl.constexpr, LOWEST: tl.constexpr,
                       PER_UNIT: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
        # Program: one head of one sequence. counted [B, H, BINS] int32: how many of its rows each bin has.
        follow(PDL)
        pair = tl.program_id(0).to(tl.int64)
        _, bin = _own(rows, weights, pair, width, WIDTH, BINS, LOWEST, PER_UNIT)
        tl.store(counted + pair * BINS + tl.arange(0, BINS), tl.histogram(tl.maximum(bin, 0), BINS, mask=bin >= 0))

    @triton.jit
    def _keep_heaviest(rows, weights, counted, kept, counts, heads, width, most, WIDTH: tl.constexpr, HEADS: tl.constexpr,
                       BINS: tl.constexpr, LOWEST: tl.constexpr, PER_UNIT: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
        # Program: one head of one sequence. The bins above `edge` are kept whole. The first heads get `rest` rows of it.
        pair, w = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
        seq, head = pair // heads, pair % heads
        row, bin = _own(rows, weights, pair, width, WIDTH, BINS, LOWEST, PER_UNIT)  # of the kernel before the last
        follow(PDL)
        b, h = tl.arange(0, BINS), tl.arange(0, HEADS)
        total = tl.zeros((BINS,), tl.int32)
        for other in range(heads):
            total += tl.load(counted + (seq * heads + other) * BINS + b)
        from_here = tl.sum(total, axis=0) - tl.cumsum(total, axis=0) + total  # rows in this bin or above it
        edge = tl.sum((from_here > most).to(tl.int32), axis=0) - 1
        rest = most - tl.sum(tl.where(b > edge, total, 0), axis=0)
        earlier = tl.load(counted + (seq * heads + h) * BINS + edge, mask=(h < head) & (edge >= 0), other=0)
        mine = rest - tl.sum(earlier, axis=0)
        same = (bin == edge) & (bin >= 0)
        rank = tl.cumsum(same.to(tl.int32), axis=0)
        chosen = ((bin > edge) & (bin >= 0)) | (same & (rank <= mine))
        place = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        count = tl.sum(chosen.to(tl.int32), axis=0)
        tl.store(counts + pair, count)
        tl.store(kept + pair * width + place, row, mask=chosen)
        tl.store(kept + pair * width + w, tl.full((WIDTH,), -1, tl.int32), mask=(w >= count) & (w < width))


def launch(rows: Tensor, weights: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Launch the Triton kernels; arguments and results as in `definition`. W must be at most MOST."""
    batch, heads, width = rows.shape
    assert rows.is_contiguous() and weights.is_contiguous() and width <= MOST
    counted = torch.empty((batch, heads, BINS), dtype=torch.int32, device=rows.device)
    kept, counts = torch.empty_like(rows), torch.empty((batch, heads), dtype=torch.int32, device=rows.device)
    size = triton_block(width)
    how = {"WIDTH": size, "BINS": BINS, "LOWEST": _LOWEST, "PER_UNIT": _PER_UNIT, **dependent(rows.device)}
    how["num_warps"] = min(16, max(4, size // PER_WARP))
    _count_weights[(batch * heads,)](rows, weights, counted, width, **how)
    _keep_heaviest[(batch * heads,)](rows, weights, counted, kept, counts, heads, width, most, HEADS=triton_block(heads), **how)
    return kept, counts


def share(rows: Tensor, weights: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """See `definition`; torch sorts more rows of a head than a program holds."""
    if HAS_TRITON and rows.is_cuda and rows.shape[2] <= MOST:
        return launch(rows, weights, most)
    return definition(rows, weights, most)
