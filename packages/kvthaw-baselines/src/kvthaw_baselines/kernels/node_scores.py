"""Scores of tree nodes: the best score that a query may find among a node's keys (IceCache's tree on the device).

A node's digest is one row: the mean of its keys, its outliers (the keys furthest from the mean) and its spread. Every row
is read once. With one node per 20 keys, a row has 776 bytes (D = 128, bf16, two outliers). 8 KV heads of 36k tokens then
take 11.4 MB, 2.7 us at 4300 GB/s, and of 128k tokens 41 MB, 9.5 us. Tensor cores do 6 G operations per element of the mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.cut import row_stride
from kvthaw.kernels.unit_scores import BLOCK, outputs, programs
from kvthaw_baselines.kernels.node_digests import TAIL


def definition(query: Tensor, digests: Tensor, stops: Tensor, counts: Tensor, *, scale: float, reach: float) -> Tensor:
    """Compute scale times the maximum of q.outlier and of q.mean + reach |q| spread, [B, H, G, U] float32; -inf for missing or
    empty nodes.

    query [B, Hq, D]. digests [B, H, U, (1 + outliers) D + 8]: mean, outliers, spread, see node_digests. stops [B, H, U + 1]
    int32: node u has stops[u + 1] - stops[u] keys. counts [B] int32: nodes of a sequence; later entries may hold anything.
    """
    heads, units = digests.shape[1:3]
    q = query.float().unflatten(1, (heads, -1))
    points, tail = digests.float().split((digests.shape[3] - TAIL, TAIL), dim=3)
    found = torch.einsum("bhgd,bhupd->bhgup", q, points.unflatten(3, (-1, q.shape[3])))
    found[..., 0] += reach * q.norm(dim=3)[..., None] * tail[:, :, None, :, 0]
    there = (torch.arange(units, device=query.device) < counts[:, None, None]) & (stops[:, :, 1:] > stops[:, :, :-1])
    best: Tensor = scale * found.amax(dim=4)
    return best.masked_fill(~there[:, :, None], -torch.inf)


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.gpu import PRECISION
    from kvthaw.kernels.parts import store_block_part
    from kvthaw.kernels.tiles import load_rows

    @triton.jit
    def _score(
        query, digests, stops, counts, scores, parts, scale, reach, heads, dim, width, units, blocks, digest_row, stop_row,
        G: tl.constexpr, GC: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, POINTS: tl.constexpr, BLOCK: tl.constexpr,
        STAGES: tl.constexpr, UPCAST: tl.constexpr,
    ):  # fmt: skip
        # Program (share of the blocks of nodes; sequence and head), as in unit_scores; stores the same outputs.
        bh, d, g = tl.program_id(1).to(tl.int64), tl.arange(0, DP), tl.arange(0, GP)
        count = tl.minimum(tl.load(counts + bh // heads), units)
        inside = d < dim
        wide = load_rows(query, bh * G + g, dim, g < G, dim, DP, True)
        far = reach * tl.sqrt(tl.sum(wide * wide, axis=1))
        q = tl.trans(wide)
        if not UPCAST:
            q = q.to(digests.dtype.element_ty)
        filled = tl.cdiv(count, BLOCK)
        share = tl.cdiv(filled, tl.num_programs(0))
        begin = tl.program_id(0) * share
        for block in tl.range(begin, tl.minimum(begin + share, filled), num_stages=STAGES):
            u = block * BLOCK + tl.arange(0, BLOCK)
            known = u < count
            row = digests + bh * digest_row + u * width
            spread = tl.load(row + POINTS * dim, mask=known, other=0.0).to(tl.float32)
            best = tl.full([BLOCK, GP], float("-inf"), tl.float32)
            for p in tl.static_range(POINTS):
                tile = tl.load(row[:, None] + p * dim + d[None, :], mask=known[:, None] & inside[None, :], other=0.0)
                found = tl.dot(tile.to(tl.float32), q, input_precision=PRECISION) if UPCAST else tl.dot(tile, q)
                if p == 0:
                    found += spread[:, None] * far[None, :]
                best = tl.maximum(best, found)
            stop = stops + bh * stop_row + u
            size = tl.load(stop + 1, mask=known, other=0) - tl.load(stop, mask=known, other=0)
            best = tl.where((size > 0)[:, None], best * scale, float("-inf"))
            tl.store(scores + (bh * G + g[None, :]) * units + u[:, None], best, mask=known[:, None] & (g < G)[None, :])
            if G > 1:
                store_block_part(parts + (bh * blocks + block) * 2 * GC + g, best, size, g < GC, GC)


def launch(
    query: Tensor, digests: Tensor, stops: Tensor, counts: Tensor, *, scale: float, reach: float
) -> tuple[Tensor, Tensor]:
    """Launch the Triton kernel; arguments as in `definition`, tables as unit_scores.launch takes them. Returns scores and parts as
    that does."""
    batch, heads, units, width = digests.shape
    dim, group = query.shape[2], query.shape[1] // heads
    query = query.contiguous()
    assert width > TAIL and (width - TAIL) % dim == 0, f"digests are {width} wide"
    scores, parts = outputs(query, digests, stops, counts, group)
    padded, wide = max(16, triton.next_power_of_2(group)), triton.next_power_of_2(dim)
    points, blocks = (width - TAIL) // dim, parts.shape[2]
    stages, many = programs(BLOCK * wide * points * digests.dtype.itemsize, blocks, batch * heads)
    _score[(many, batch * heads)](
        query, digests, stops, counts, scores, parts, scale, reach, heads, dim, width, units, blocks, row_stride(digests),
        row_stride(stops), G=group, GC=parts.shape[4], GP=padded, DP=wide, POINTS=points, BLOCK=BLOCK, STAGES=stages, num_warps=4,
        UPCAST=query.device.type == "cpu" or digests.dtype == torch.float32,
    )  # fmt: skip
    return scores, parts
