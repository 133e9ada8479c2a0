"""Collision scores: the votes of a key's centroids, summed over the subspaces (ParisKV, equation 15).

Bytes and operations, 8 KV heads, n = 128k, d = 128: a program reads the 16 id bytes of a key once for all query heads of a
group (16.8 MB). It writes one score byte (1 MB); 4 us at 4200 GB/s. The 16 table lookups per key, 16.8 M in all, are the
bottleneck. A program holds the 4096 words of all subspaces in shared memory, where 32 random words take about 3.5 cycles.
That is 14 k cycles or 8 us over 132 multiprocessors (62 us at 1M tokens). The bytes of a word hold the votes of
four query heads, so one lookup and one addition serve four heads; a byte cannot overflow, as 6 B <= 192. The maximum over
a group's heads counts. The ids of a
subspace are contiguous, [B, capacity], so a thread loads 16 keys at once and then holds all their subspaces. The kernel
also computes the histogram of the scores, per chunk of keys and in total.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.chain import dependent
from kvthaw.kernels.cut import row_stride

CHUNK = 2048
"""Keys per program; capacities are multiples of it."""
WARPS = 4
BINS = 128
"""Coarse scores are below this."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Coarse scores and their histograms, as a launcher leaves them.

    scores: [L, H, n] uint8, undefined beyond a sequence's length.
    counts: [L, H, BINS, chunks] int32, keys of a chunk that score at least the bin.
    totals: [L, H, BINS] int32, the same for all keys.
    """

    scores: Tensor
    counts: Tensor
    totals: Tensor


def shift(most: int) -> int:
    """Return how many low bits of a key's votes, at most `most`, to drop so that scores are below BINS."""
    return max(0, most.bit_length() - (BINS - 1).bit_length())


def definition(table: Tensor, ids: Tensor, shift: int) -> Tensor:
    """Compute scores [L, H, n] int32 from packed votes [L, H, W, B, 256] and ids [L, H, B, n], without the lowest `shift` bits."""
    total = torch.zeros((*table.shape[:3], ids.shape[3]), dtype=torch.int32, device=ids.device)
    for b in range(ids.shape[2]):
        total += table[:, :, :, b].gather(3, ids[:, :, None, b].long().expand(-1, -1, table.shape[2], -1))
    scores = torch.zeros_like(total[:, :, 0])
    for byte in range(4):
        scores = torch.maximum(scores, ((total >> (8 * byte)) & 255).amax(dim=2))
    return scores >> shift


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.chain import follow

    @triton.jit
    def _ids(ids, row, capacity, place):
        return tl.load(ids + row[:, None] * capacity + place[None, :])  # always in bounds

    @triton.jit
    def _collide(table, ids, lengths, scores, counts, totals, heads, capacity, chunks, W: tl.constexpr, SUBS: tl.constexpr,
                 PART: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr,
                 CHUNK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
        # Program: CHUNK keys of one KV head, PART subspaces at a time. All lookups of a part are one gather. The lookups of
        # a key are adjacent, so that a thread sums them alone. The first ids are loaded before the table is available.
        chunk = tl.program_id(0)
        pair = (tl.program_id(2) * heads + tl.program_id(1)).to(tl.int64)
        length = tl.load(lengths + tl.program_id(2))
        if chunk * CHUNK >= length:
            follow(PDL)
        else:
            place = chunk * CHUNK + tl.arange(0, CHUNK)
            best = tl.zeros((CHUNK,), tl.int32)
            b = tl.arange(0, PART)
            id = _ids(ids, pair * SUBS + b, capacity, place)
            follow(PDL)
            for w in tl.range(0, W, num_stages=1):
                total = tl.zeros((CHUNK,), tl.int32)
                for first in tl.range(0, SUBS, PART, num_stages=1):
                    if W > 1 or SUBS > PART:
                        id = _ids(ids, pair * SUBS + first + b, capacity, place)
                    entry = id.to(tl.int32) + b[:, None] * 256
                    votes = tl.load(table + ((pair * W + w) * SUBS + first) * 256 + tl.arange(0, PART * 256))
                    found = tl.gather(votes, tl.reshape(tl.trans(entry), (CHUNK * PART,)), 0)
                    total += tl.sum(tl.reshape(found, (CHUNK, PART)), axis=1)
                for byte in tl.static_range(4):
                    best = tl.maximum(best, (total >> (8 * byte)) & 255)
            best = best >> SHIFT
            tl.store(scores + pair * (chunks * CHUNK) + place, best.to(tl.uint8))
            bin = tl.arange(0, BINS)
            counted = tl.histogram(best, BINS, mask=place < length)
            above = tl.sum(counted) - (tl.cumsum(counted, axis=0) - counted)
            tl.store(counts + (pair * BINS + bin) * chunks + chunk, above)
            tl.atomic_add(totals + pair * BINS + bin, above, mask=above > 0, sem="relaxed")


def launch(table: Tensor, ids: Tensor, lengths: Tensor, totals: Tensor, shift: int) -> Scores:
    """Launch the kernel on any device. totals [L, H, BINS] int32 must be zero."""
    batch, heads, words, subs = table.shape[:4]
    apart = row_stride(ids, rows=3)
    assert ids.shape[3] % CHUNK == apart % CHUNK == 0 and table.is_contiguous() and totals.is_contiguous()
    assert ids.dtype == torch.uint8 and table.dtype == lengths.dtype == totals.dtype == torch.int32
    assert totals.shape == (batch, heads, BINS)
    chunks = ids.shape[3] // CHUNK
    scores = torch.empty((batch, heads, ids.shape[3]), dtype=torch.uint8, device=ids.device)
    counts = torch.empty((batch, heads, BINS, chunks), dtype=torch.int32, device=ids.device)
    _collide[(chunks, heads, batch)](
        table, ids, lengths, scores, counts, totals, heads, apart, chunks, W=words, SUBS=subs,
        PART=min(subs, 16), BINS=BINS, SHIFT=shift, CHUNK=CHUNK,
        num_warps=WARPS, **dependent(ids.device),
    )  # fmt: skip
    return Scores(scores, counts, totals)


def collide(table: Tensor, ids: Tensor, lengths: Tensor, totals: Tensor, shift: int) -> Scores | Tensor:
    """Compute coarse scores of all keys: votes without their lowest `shift` bits, less than BINS. Their histograms come with
    them on a GPU.

    table: packed votes (tiers.pack); ids [L', H, B, n] uint8, L' >= L, the first n places of a table; lengths [L'] int32, at most
    n; totals [L, H, BINS] int32 zeros, filled on a GPU.
    """
    if ids.is_cuda and HAS_TRITON:
        return launch(table, ids, lengths, totals, shift)
    return definition(table, ids[: table.shape[0]], shift).to(torch.uint8)
