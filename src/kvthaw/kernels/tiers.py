"""Tiered votes: a collision with a centroid is worth 0 to 6 votes (ParisKV, appendix B.2.1).

In each subspace the 256 sign patterns c are ranked by <q_b, c>. The limits are the top 5, 15, 30, 50, 75 and 100 % of the
rho n nearest keys. A cluster gives one vote for each limit above the number of keys ranked before it, so 6 to 1 votes, else
0. Equal limits for all tiers make the votes binary.

Bytes and operations, 32 query heads, d = 128: 8 KB of queries, 131 KB of cluster sizes, 512 tables. The similarity of a
pattern's opposite is its negation. So ranking compares all pairs of only 128 patterns: 512 x 16384 comparisons and
additions, 0.5 us on the whole GPU. The opposites are ranked only if fewer than rho n keys have a positive similarity. There
is no sort: between the loads and the votes everything stays in registers and shared memory. The latency is a chain of load,
sum, ranking and store, 4 us. Sizes are summed as float32, exact below 2^24 keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.chain import dependent
from kvthaw.kernels.encode import CENTROIDS, SUB
from kvthaw.kernels.query import Rotated, empty_rotated, in_bytes, rotate_queries
from kvthaw.kernels.srht import Rotation

WARPS = 4


def similarities(rotated: Tensor) -> Tensor:
    """Compute <q_b, c> for all sign patterns: [L, H, P, 8, B] -> [L, H, P, B, 256], summed in the order of j."""
    c = torch.arange(CENTROIDS, device=rotated.device)
    out = torch.zeros((*rotated.shape[:3], rotated.shape[4], CENTROIDS), device=rotated.device)
    for j in range(SUB):
        y = rotated[:, :, :, j, :, None]
        out = out + torch.where((c >> j) & 1 > 0, y, -y)
    return out


def definition(similarity: Tensor, sizes: Tensor, limits: Tensor) -> Tensor:
    """Compute votes [L, H, P, B, 256] int32.

    similarity: of the same shape.
    sizes: [L, H, B, 256].
    limits: [L, 6], numbers of keys at which tiers end.

    The keys of more similar clusters rank before a cluster; equally similar clusters share a tier.
    """
    ranked, order = torch.sort(similarity, dim=-1, descending=True)
    size = sizes[:, :, None].expand_as(similarity).gather(-1, order)
    before = size.cumsum(dim=-1) - size
    again = torch.nn.functional.pad(ranked[..., 1:] == ranked[..., :-1], (1, 0))
    before = torch.where(again, 0, before).cummax(dim=-1).values  # ties share the rank of the first
    votes = (before[..., None] < limits[:, None, None, None, None]).sum(dim=-1)
    return torch.zeros_like(votes).scatter_(-1, order, votes).int()


def most_votes(subs: int) -> int:
    """Return the maximum votes of a key over `subs` subspaces."""
    return 6 * subs


def pack(votes: Tensor) -> Tensor:
    """Pack votes [L, H, P, B, 256] into [L, H, W, B, 256] int32: four heads in the bytes of a word."""
    spare = -votes.shape[2] % 4
    full = torch.nn.functional.pad(votes, (0, 0, 0, 0, 0, spare)).unflatten(2, (-1, 4))
    packed: Tensor = (full << (8 * torch.arange(4, device=votes.device))[:, None, None]).sum(dim=3)
    return packed.int()


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.chain import follow
    from kvthaw.kernels.query import mean_of, store_rotated

    @triton.jit
    def _similarity(y, c):
        # <y, c>, summed in the order of j.
        j = tl.arange(0, 8)
        total = tl.zeros(c.shape, tl.float32)
        for bit in tl.static_range(8):
            part = tl.sum(tl.where(j == bit, y, 0.0))
            total += tl.where((c >> bit) & 1 > 0, part, -part)
        return total

    @triton.jit
    def _tier(before, ends):
        votes = tl.zeros(before.shape, tl.int32)
        for t in tl.static_range(6):
            votes += (before < ends[t].to(tl.float32)).to(tl.int32)
        return votes

    @triton.jit
    def _tiers(query, basis, sizes, limits, values, whole, factors, table, totals, heads, scale, dim, GROUP: tl.constexpr,
               P: tl.constexpr, SUBS: tl.constexpr, SQUARE: tl.constexpr, BINS: tl.constexpr,
               PDL: tl.constexpr):  # fmt: skip
        # Program: a query head in one subspace. The similarity of a sign pattern's opposite is its negation, so 128 absolute
        # similarities determine the ranking: 32 patterns at a time, each thread comparing with its warp's share of the 128. The
        # first program of a KV head clears its score histogram.
        pair = tl.program_id(0)
        b = tl.program_id(1)
        p = tl.program_id(2)
        limit = limits + (pair // heads) * 6
        i = tl.arange(0, SQUARE)
        j = tl.arange(0, 8)
        o = tl.arange(0, 128)
        size = sizes + (pair * SUBS + b) * 256
        lower = tl.load(size + o).to(tl.float32)
        upper = tl.load(size + 255 - o).to(tl.float32)
        columns = tl.load(basis + i[:, None] * SQUARE + b * 8 + j[None, :]).to(tl.float32)
        ends = (tl.load(limit), tl.load(limit + 1), tl.load(limit + 2), tl.load(limit + 3), tl.load(limit + 4),
                tl.load(limit + 5))  # fmt: skip
        follow(PDL)
        if (b == 0) & (p == 0):
            tl.store(totals + pair * BINS + tl.arange(0, BINS), tl.zeros((BINS,), tl.int32))
        x = mean_of(query, pair * GROUP + p * (GROUP // P), i, dim, GROUP // P, SQUARE)
        y = tl.sum(columns * x[:, None], axis=0) * scale
        store_rotated(values, whole, factors, y, pair * P + p, b, SUBS)
        all = _similarity(y, o)
        toward = tl.where(all >= 0, lower, upper)  # keys of the pattern with similarity >= 0, of each pair
        away = tl.where(all >= 0, upper, lower)
        near, half = tl.abs(all), tl.sum(toward)
        word = table + (((pair * ((P + 3) // 4) + p // 4) * SUBS + b) * 256) * 4  # bytes: of a word of four heads each has one
        for first in tl.static_range(0, 128, 32):
            c = first + tl.arange(0, 32)
            mine = _similarity(y, c)
            before = tl.sum(tl.where(near[:, None] > tl.abs(mine)[None, :], toward[:, None], 0.0), axis=0)
            front = _tier(before, ends)
            back = tl.zeros((32,), tl.int32)
            if half < ends[5].to(tl.float32):  # negative similarities get votes only after few keys
                behind = half + tl.sum(tl.where(near[:, None] < tl.abs(mine)[None, :], away[:, None], 0.0), axis=0)
                back = _tier(behind, ends)
            back = tl.where(mine == 0, front, back)
            votes, opposite = tl.where(mine >= 0, front, back), tl.where(mine >= 0, back, front)
            tl.store(word + c * 4 + p % 4, votes.to(tl.uint8))
            tl.store(word + (255 - c) * 4 + p % 4, opposite.to(tl.uint8))
        if P % 4 != 0 and p == P - 1:
            for rest in tl.static_range(P % 4, 4):  # unused bytes of the last word
                tl.store(word + rest + tl.arange(0, 256) * 4, tl.zeros((256,), tl.uint8))


def launch(
    query: Tensor, rotation: Rotation, sizes: Tensor, limits: Tensor, totals: Tensor, *, mean: bool
) -> tuple[Rotated, Tensor]:
    """Launch the kernel on any device: rotates and ranks query [L, Hq, d], packs votes, clears totals [L, H, bins] int32."""
    batch, q_heads, dim = query.shape
    heads, subs = sizes.shape[1:3]
    assert query.is_contiguous() and sizes.is_contiguous() and limits.is_contiguous() and totals.is_contiguous()
    assert sizes.dtype == limits.dtype == totals.dtype == torch.int32
    group = q_heads // heads
    scored = 1 if mean else group
    rotated = empty_rotated(batch, heads, scored, subs, query.device)
    table = torch.empty((batch, heads, (scored + 3) // 4, subs, CENTROIDS), dtype=torch.int32, device=query.device)
    _tiers[(batch * heads, subs, scored)](
        query, rotation.basis, sizes, limits, rotated.values, rotated.whole, rotated.factors,
        table.view(torch.uint8), totals, heads, rotation.scale, dim, GROUP=group, P=scored, SUBS=subs,
        SQUARE=rotation.basis.shape[0], BINS=totals.shape[2], num_warps=WARPS, **dependent(query.device),
    )  # fmt: skip
    return rotated, table


def tiers(
    query: Tensor, rotation: Rotation, sizes: Tensor, limits: Tensor, totals: Tensor, *, mean: bool
) -> tuple[Rotated, Tensor]:
    """Return rotated queries and packed votes [L, H, W, B, 256] int32 for query [L, Hq, d]; clear totals."""
    if query.is_cuda and HAS_TRITON:
        return launch(query.contiguous(), rotation, sizes, limits, totals, mean=mean)
    rotated = in_bytes(rotate_queries(query, sizes.shape[1], rotation, mean=mean))
    totals.zero_()
    return rotated, pack(definition(similarities(rotated.values), sizes, limits))
