"""What a collision with each centroid is worth to a query, graded: as much as the centroid is similar to it.

A key's votes then add up to sum_b <q_b, c_b>, an estimate of q.k by the signs of k alone, in whole numbers: in each subspace a
centroid gives floor(most (<q_b, c> - least_b) / span), where span >= sum_b (greatest_b - least_b), so that the votes of all
subspaces are at most `most` and fit the byte in which `collide` adds them. Sign patterns span 2 |y|_1 of the rotated query y in
all, which is at most 2 sqrt(d') |q|, d' its coordinates, and some 0.8 of it: known without rotating the whole of it.

Beside tiers (appendix B.2.1), which see the order of the keys within a
subspace only, the subspaces in which the query is long count for more, and nothing needs to be ranked or counted.

Bytes and operations, 32 query heads, d = 128: 8 KB of queries, 0.5 MB of votes written: a chain of load, sum and store.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.chain import chained
from kvthaw.kernels.encode import CENTROIDS, SUB
from kvthaw.kernels.query import Rotated, in_bytes, room, rotate_queries
from kvthaw.kernels.srht import Rotation
from kvthaw.kernels.tiers import Combine, pack, similarities

WARPS = 4


def most(subs: int, combine: Combine) -> int:
    """The most votes of a key over `subs` subspaces: of each head ("max"), or of a group's heads together ("sum"). With 127 the
    rounding costs a third of a point of recall at head_dim 64 and scores have as many values as with tiers at 128."""
    return (127 if subs <= 16 else 255) if combine == "max" else 1023


def sign_span(rotated: Tensor) -> Tensor:
    """No less than all similarities of rotated queries [L, H, P, 8, B] with sign patterns span together: [L, H, P]."""
    length: Tensor = rotated.flatten(3).norm(dim=3)
    return 2 * math.sqrt(rotated.shape[3] * rotated.shape[4]) * length


def definition(similarity: Tensor, combine: Combine, span: Tensor | None = None) -> Tensor:
    """Votes [L, H, P, B, 256] int32 of similarities <q_b, c>, likewise. span [L, H, P]; without it, what they span, added up.
    A query of zeros gives none."""
    least, greatest = similarity.amin(dim=-1, keepdim=True), similarity.amax(dim=-1, keepdim=True)
    span = (greatest - least).sum(dim=3, keepdim=True) if span is None else span[..., None, None]
    of_head = most(similarity.shape[3], combine) // (similarity.shape[2] if combine == "sum" else 1)
    return torch.where(span > 0, (similarity - least) * (of_head / span), 0.0).floor().int()


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.chain import follow
    from kvthaw.kernels.query import put

    @triton.jit
    def _graded(query, basis, values, whole_values, factors, table, totals, scale, dim, MOST: tl.constexpr, GROUP: tl.constexpr,
                P: tl.constexpr, PER: tl.constexpr, SUBS: tl.constexpr, SQUARE: tl.constexpr, BINS: tl.constexpr,
                SUM: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
        # One program: PER query heads in one subspace. A pattern's similarity is the least plus twice the coordinates whose sign
        # it shares. The first program of a KV head clears its histogram of scores.
        pair = tl.program_id(0)
        b = tl.program_id(1)
        i = tl.arange(0, SQUARE)
        j = tl.arange(0, 8)
        c = tl.arange(0, 256)
        own = tl.load(basis + i[:, None] * SQUARE + b * 8 + j[None, :]).to(tl.float32)
        follow(PDL)
        if (b == 0) & (tl.program_id(2) == 0):
            tl.store(totals + pair * BINS + tl.arange(0, BINS), tl.zeros((BINS,), tl.int32))
        sum = tl.zeros((256,), tl.int32)
        for one in tl.static_range(PER):
            p = tl.program_id(2) * PER + one
            x = tl.zeros((SQUARE,), tl.float32)
            for g in tl.static_range(GROUP // P):
                row = (pair * GROUP + p * (GROUP // P) + g) * dim
                x += tl.load(query + row + i, mask=i < dim, other=0.0).to(tl.float32)
            x = x / (GROUP // P)
            whole = tl.sqrt(8.0 * SUBS * tl.sum(x * x))  # half the span
            y = tl.sum(own * x[:, None], axis=0) * scale
            put(values, whole_values, factors, y, pair * P + p, b, SUBS)
            votes = tl.zeros((256,), tl.float32)
            for bit in tl.static_range(8):
                part = tl.sum(tl.where(j == bit, y, 0.0))
                votes += tl.where(((c >> bit) & 1 > 0) == (part >= 0), tl.abs(part), 0.0)
            votes = tl.where(whole > 0, votes * (MOST / tl.where(whole > 0, whole, 1.0)), 0.0)
            if SUM:
                sum += tl.floor(votes).to(tl.int32)
            else:  # a byte of the word of four heads; a last word that is not full has zeros in the rest
                word = table + (((pair * ((P + 3) // 4) + p // 4) * SUBS + b) * 256) * 4
                tl.store(word + p % 4 + c * 4, tl.floor(votes).to(tl.int32).to(tl.uint8))
                if P % 4 != 0 and p == P - 1:
                    for rest in tl.static_range(P % 4, 4):
                        tl.store(word + rest + c * 4, tl.zeros((256,), tl.uint8))
        if SUM:
            tl.store(table + (pair * SUBS + b) * 256 + c, sum)


def launch(query: Tensor, rotation: Rotation, heads: int, totals: Tensor, *, mean: bool,
           combine: Combine) -> tuple[Rotated, Tensor]:  # fmt: skip
    """The kernel, on whatever device query [L, Hq, d] is: rotates, grades, packs, and clears totals [L, H, bins] int32."""
    lanes, q_heads, dim = query.shape
    assert query.is_contiguous() and totals.is_contiguous() and totals.dtype == torch.int32
    group, subs, square = q_heads // heads, rotation.padded // SUB, rotation.basis.shape[0]
    scored = 1 if mean else group
    rotated = room(lanes, heads, scored, subs, query.device)
    words, pdl = 1 if combine == "sum" else (scored + 3) // 4, chained(query.device)
    table = torch.empty((lanes, heads, words, subs, CENTROIDS), dtype=torch.int32, device=query.device)
    apart, share = (1, scored) if combine == "sum" else (scored, 1)
    _graded[(lanes * heads, subs, apart)](
        query, rotation.basis, rotated.values, rotated.whole, rotated.factors,
        table if combine == "sum" else table.view(torch.uint8), totals, rotation.scale, dim, MOST=most(subs, combine) // share,
        GROUP=group, P=scored, PER=scored // apart, SUBS=subs, SQUARE=square, BINS=totals.shape[2], SUM=combine == "sum",
        PDL=pdl, num_warps=WARPS, launch_pdl=pdl,
    )  # fmt: skip
    return rotated, table


def graded(query: Tensor, rotation: Rotation, heads: int, totals: Tensor, *, mean: bool,
           combine: Combine) -> tuple[Rotated, Tensor]:  # fmt: skip
    """Rotated queries and packed votes [L, H, W, B, 256] int32 of query [L, Hq, d]."""
    if query.is_cuda and HAS_TRITON:
        return launch(query.contiguous(), rotation, heads, totals, mean=mean, combine=combine)
    rotated = in_bytes(rotate_queries(query, heads, rotation, mean=mean))
    totals.zero_()
    return rotated, pack(definition(similarities(rotated.values), combine, sign_span(rotated.values)), combine)
