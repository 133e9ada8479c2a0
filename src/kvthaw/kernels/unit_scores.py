"""Scores of units (pages or clusters) from their digests.

Every digest is read once: B H U E elements (ClusterKV at 128k tokens, 8 heads, D = 128: 1638 centroids, 3.4 MB; pages of 32
at 1M: 134 MB, 31 us at 4300 GB/s), with 2 G operations per element on the tensor cores. The programs that the device holds
at once share the blocks of a head's units. Each keeps several blocks in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.chain import dependent
from kvthaw.kernels.cut import row_stride

BLOCK = 64
"""Units scored together; each block stores one part of the softmax denominators."""
_PROCESSORS, _SHARED = 132, 200 << 10  # multiprocessors of an H200, and bytes of shared memory to use on each


@dataclass(frozen=True, slots=True)
class RecentQueries:
    """The last W queries, updated in place.

    queries [B, Hq, W, D]: the query of step s at s % W. seen [B, W] float32: 1 where a query is stored. steps [1] int64: number
    of steps.
    """

    queries: Tensor
    seen: Tensor
    steps: Tensor

    def record(self, query: Tensor) -> None:
        """Store the query [B, Hq, D] of a step and count the step. No host sync."""
        slot = self.steps % self.queries.shape[2]
        self.queries.index_copy_(2, slot, query[:, :, None].to(self.queries.dtype))
        self.seen.index_fill_(1, slot, 1.0)
        self.steps.add_(1)


def definition(query: Tensor, digests: Tensor, stops: Tensor, counts: Tensor, *, scale: float, mean: bool) -> Tensor:
    """Score each unit for the query heads of its group, [B, H, G, U] float32; -inf for missing or empty units.

    query: [B, Hq, D].
    digests: [B, H, U, E]. If E = D: a unit's centroid, with score scale q.mu. If E = 2 D: the centre and half extent of the
        box around its keys, with score scale (q.c + |q|.delta), the maximum over the box.
    stops: [B, H, U + 1] int32; unit u has stops[u + 1] - stops[u] tokens.
    counts: [B] int32, units of a sequence; later entries may hold anything.
    mean: the mean query of the heads, rounded to the dtype of query, scores for all, and G is 1.
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

    from kvthaw.kernels.chain import follow
    from kvthaw.kernels.gpu import PRECISION
    from kvthaw.kernels.parts import store_block_part

    @triton.jit
    def _score(
        query, digests, stops, counts, scores, parts, recent_queries, seen, steps, scale, heads, dim, width, units, blocks, window,
        digest_row, stop_row,
        G: tl.constexpr, GS: tl.constexpr, GC: tl.constexpr, GP: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr,
        STAGES: tl.constexpr, UPCAST: tl.constexpr, RECORD: tl.constexpr, PARTS: tl.constexpr,
        PDL: tl.constexpr,
    ):  # fmt: skip
        # Program (share of the blocks of units; sequence and head; GP queries, or PARTS * GP queries whose mean scores).
        # scores [B, H, GS, U]; parts [B, H, blocks, 2, GC]: maximum, and sum of size exp(score - maximum), from which
        # _narrow computes the denominators. GS is 1 if the mean query scores for all.
        bh, e, g = tl.program_id(1).to(tl.int64), tl.arange(0, EP), tl.program_id(2) * GP + tl.arange(0, GP)
        follow(PDL)
        count = tl.minimum(tl.load(counts + bh // heads), units)
        inside = e < width
        channel = tl.where(e < dim, e, e - dim)
        total = tl.zeros((EP,), tl.float32)
        for part in tl.static_range(PARTS):
            row = bh * G + g[:, None] + part * GP
            own = (g[:, None] + part * GP < G) & inside[None, :]
            q = tl.load(query + row * dim + channel[None, :], mask=own, other=0.0)
            if RECORD:  # noqa: SIM102  RecentQueries.record, except that _choose counts the step after all reads
                if tl.program_id(0) == 0:
                    slot = tl.load(steps) % window
                    tl.store(recent_queries + (row * window + slot) * dim + e[None, :], q, mask=own & (e < dim)[None, :])
                    tl.store(seen + bh // heads * window + slot, 1.0)
            q = q.to(tl.float32)
            total += tl.sum(q, axis=0)
        if GS < G:
            q = tl.broadcast_to((total / G)[None, :], (GP, EP))
            q = q.to(query.dtype.element_ty).to(tl.float32)
        q = tl.trans(tl.where((e < dim)[None, :], q, tl.abs(q)))
        if not UPCAST:
            q = q.to(digests.dtype.element_ty)
        filled = tl.cdiv(count, BLOCK)
        share = tl.cdiv(filled, tl.num_programs(0))
        begin = tl.program_id(0) * share
        for block in tl.range(begin, tl.minimum(begin + share, filled), num_stages=STAGES):
            u = block * BLOCK + tl.arange(0, BLOCK)
            known = u < count
            tile = tl.load(
                digests + bh * digest_row + u[:, None] * width + e[None, :], mask=known[:, None] & inside[None, :], other=0.0
            )
            stop = stops + bh * stop_row + u
            size = tl.load(stop + 1, mask=known, other=0) - tl.load(stop, mask=known, other=0)
            # 16-bit operands are exact here: both have the tile's dtype, and the sum is float32.
            found = tl.dot(tile.to(tl.float32), q, input_precision=PRECISION) if UPCAST else tl.dot(tile, q)
            found *= scale
            found = tl.where((size > 0)[:, None], found, float("-inf"))
            to = scores + (bh * GS + g[None, :]) * units + u[:, None]
            tl.store(to, found, mask=known[:, None] & (g < GS)[None, :])
            if GS > 1:
                store_block_part(parts + (bh * blocks + block) * 2 * GC + g, found, size, g < GC, GC)


def launch(
    query: Tensor,
    digests: Tensor,
    stops: Tensor,
    counts: Tensor,
    *,
    scale: float,
    mean: bool,
    recent: RecentQueries | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the Triton kernel; arguments as in `definition`, tables contiguous or cut to their first units.

    Returns the scores, undefined past a sequence's units, and parts [B, H, blocks, 2, at least G] float32: for every BLOCK
    units the largest score m and the sum of n exp(score - m), n the tokens of a unit; undefined if G is 1. Stores the query in
    `recent` but does not count the step.
    """
    batch, heads, units, width = digests.shape
    dim, group = query.shape[2], query.shape[1] // heads
    query, seen = query.contiguous(), 1 if mean else group
    scores, parts = outputs(query, digests, stops, counts, seen)
    assert width in (dim, 2 * dim), f"digests are {width} wide"
    if recent is not None:
        assert recent.queries.is_contiguous() and recent.seen.is_contiguous() and recent.seen.dtype == torch.float32
        assert recent.queries.shape[:2] == query.shape[:2] and recent.queries.shape[3] == dim
        assert recent.steps.dtype == torch.int64
    padded, wide, blocks = max(16, triton.next_power_of_2(group)), triton.next_power_of_2(width), parts.shape[2]
    tile, held = BLOCK * wide * digests.dtype.itemsize, padded * wide * digests.dtype.itemsize
    if tile + 2 * held > _SHARED:
        padded = 16
    shares = triton.cdiv(group, padded)
    stages, many = programs(tile, blocks, batch * heads)
    to = (query, query, counts, 0) if recent is None else (recent.queries, recent.seen, recent.steps, recent.queries.shape[2])
    _score[(many, batch * heads, 1 if mean else shares)](
        query, digests, stops, counts, scores, parts, *to[:3], scale, heads, dim, width, units, blocks, to[3],
        row_stride(digests), row_stride(stops),
        G=group, GS=seen, GC=parts.shape[4], GP=padded, EP=wide, BLOCK=BLOCK, STAGES=stages, num_warps=4, RECORD=recent is not None,
        PARTS=shares if mean else 1, UPCAST=query.device.type == "cpu" or digests.dtype == torch.float32,
        **dependent(query.device),
    )  # fmt: skip
    return scores, parts


def outputs(query: Tensor, digests: Tensor, stops: Tensor, counts: Tensor, seen: int) -> tuple[Tensor, Tensor]:
    """Check tables of units, and allocate scores and parts of `seen` queries a KV head for a kernel to fill."""
    batch, heads, units, _ = digests.shape
    assert counts.is_contiguous()
    assert stops.dtype == counts.dtype == torch.int32, f"stops are {stops.dtype}, counts {counts.dtype}"
    assert stops.shape == (batch, heads, units + 1), f"stops are {tuple(stops.shape)}"
    assert query.dtype == digests.dtype, f"queries are {query.dtype}, digests {digests.dtype}"
    sizes = (seen, units), (max(1, triton.cdiv(units, BLOCK)), 2, triton.next_power_of_2(seen))
    scores, parts = (query.new_empty((batch, heads, *size), dtype=torch.float32) for size in sizes)
    return scores, parts


def programs(tile: int, blocks: int, pairs: int) -> tuple[int, int]:
    """Return the pipeline stages for tiles of `tile` bytes, and the number of programs that share the blocks of a (sequence,
    head) pair. The programs of all `pairs` pairs run in one wave."""
    stages, resident = plan(tile)
    return stages, min(blocks, max(1, resident * _PROCESSORS // pairs))


def plan(tile: int) -> tuple[int, int]:
    """Return the pipeline stages for tiles of `tile` bytes (1 to 3), and how many such programs fit on a multiprocessor (1 to
    4)."""
    stages = max(1, min(3, _SHARED // 2 // tile))
    return stages, max(1, min(4, _SHARED // (stages * tile)))
