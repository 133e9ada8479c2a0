"""Scores of units (pages or clusters) from their digests.

Every digest is read once: B H U E elements (ClusterKV at 128k tokens, 8 heads, d = 128: 1638 centroids, 3.4 MB; pages of 32
at 1M: 134 MB, 31 us at 4300 GB/s) for 2 G operations an element, on the tensor cores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON

BLOCK = 64
"""Units a program scores; it leaves one part of the softmax denominators."""


def definition(query: Tensor, digests: Tensor, stops: Tensor, counts: Tensor, *, scale: float, mean: bool) -> Tensor:
    """[B, H, G, U] float32: what the query heads of a group think of each unit; -inf for units that do not exist or are empty.

    query [B, Hq, D]. digests [B, H, U, E]: a unit's centroid where E = D, score scale q.mu; or centre and half extent of the
    box around its keys where E = 2 D, score scale (q.c + |q|.delta), the largest in the box. stops [B, H, U + 1] int32: unit
    u has stops[u + 1] - stops[u] tokens; counts [B] int32: units of a lane; what is behind them may hold anything. mean: the
    heads' mean query, rounded to the dtype of query, scores for all, and G is 1.
    """
    heads, units = digests.shape[1:3]
    q = query.float().unflatten(1, (heads, -1))
    if mean:
        q = q.mean(dim=2, keepdim=True).to(query.dtype).float()
    if digests.shape[3] == 2 * q.shape[3]:
        q = torch.cat((q, q.abs()), dim=3)
    there = (torch.arange(units, device=query.device) < counts[:, None, None]) & (stops[:, :, 1:] > stops[:, :, :-1])
    scores: Tensor = scale * q @ digests.float().transpose(2, 3)
    return scores.masked_fill(~there[:, :, None], -torch.inf)


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _score(
        query, digests, stops, counts, scores, parts, scale, heads, dim, width, units, blocks,
        G: tl.constexpr, GS: tl.constexpr, GP: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr, UPCAST: tl.constexpr,
    ):  # fmt: skip
        # One program a (block of units; lane and head). scores [B, H, GS, U]; parts [B, H, blocks, 2, GP]: maximum, and
        # the sum of size exp(score - maximum), from which _choose makes the denominators. GS is 1 where the mean query scores
        # for all.
        block, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
        count = tl.load(counts + bh // heads)
        if block * BLOCK < count:
            u, e, g = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, EP), tl.arange(0, GP)
            known, inside = u < count, e < width
            tile = tl.load(
                digests + (bh * units + u[:, None]) * width + e[None, :], mask=known[:, None] & inside[None, :], other=0.0
            )
            channel = tl.where(e < dim, e, e - dim)
            q = tl.load(
                query + (bh * G + g[:, None]) * dim + channel[None, :], mask=(g < G)[:, None] & inside[None, :], other=0.0
            )
            q = q.to(tl.float32)
            if GS < G:
                q = tl.broadcast_to((tl.sum(q, axis=0) / G)[None, :], (GP, EP))
                q = q.to(query.dtype.element_ty).to(tl.float32)
            q = tl.trans(tl.where((e < dim)[None, :], q, tl.abs(q)))
            if UPCAST:
                found = tl.dot(tile.to(tl.float32), q, input_precision="tf32x3") * scale
            else:  # exact: both were in the tile's dtype, the sum is in float32
                found = tl.dot(tile, q.to(tile.dtype)) * scale
            stop = stops + bh * (units + 1) + u
            size = tl.load(stop + 1, mask=known, other=0) - tl.load(stop, mask=known, other=0)
            found = tl.where((size > 0)[:, None], found, float("-inf"))
            place = scores + (bh * GS + g[None, :]) * units + u[:, None]
            tl.store(place, found, mask=known[:, None] & (g < GS)[None, :])
            if GS > 1:
                top = tl.max(found, axis=0)
                safe = tl.where(top == float("-inf"), 0.0, top)
                total = tl.sum(tl.exp(found - safe[None, :]) * size.to(tl.float32)[:, None], axis=0)
                part = parts + (bh * blocks + block) * 2 * GP + g
                tl.store(part, top)
                tl.store(part + GP, total)


def launch(query: Tensor, digests: Tensor, stops: Tensor, counts: Tensor, *, scale: float, mean: bool) -> tuple[Tensor, Tensor]:
    """The Triton kernel; arguments as in `definition`, all contiguous. Returns the scores, which behind a lane's units hold
    anything, and parts [B, H, blocks, 2, at least G] float32: of every BLOCK units the largest score, m, and the sum of n
    exp(score - m), n a unit's tokens; where G is 1, they hold anything."""
    batch, heads, units, width = digests.shape
    dim, group = query.shape[2], query.shape[1] // heads
    query = query.contiguous()
    assert all(t.is_contiguous() for t in (digests, stops, counts)), "the tables are read as contiguous"
    assert stops.dtype == counts.dtype == torch.int32, f"stops are {stops.dtype}, counts {counts.dtype}"
    assert stops.shape == (batch, heads, units + 1), f"stops are {tuple(stops.shape)}"
    assert width in (dim, 2 * dim), f"digests are {width} wide"
    assert query.dtype == digests.dtype, f"queries are {query.dtype}, digests {digests.dtype}"
    seen, padded = 1 if mean else group, max(16, triton.next_power_of_2(group))
    blocks = max(1, triton.cdiv(units, BLOCK))
    scores = query.new_empty((batch, heads, seen, units), dtype=torch.float32)
    parts = query.new_empty((batch, heads, blocks, 2, padded), dtype=torch.float32)
    _score[(blocks, batch * heads)](
        query, digests, stops, counts, scores, parts, scale, heads, dim, width, units, blocks,
        G=group, GS=seen, GP=padded, EP=triton.next_power_of_2(width), BLOCK=BLOCK, num_warps=4,
        UPCAST=query.device.type == "cpu" or digests.dtype == torch.float32,
    )  # fmt: skip
    return scores, parts
