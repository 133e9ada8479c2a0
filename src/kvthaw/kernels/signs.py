"""Sign votes: sum_i q_i [k_i >= 0] - sum_i q_i / 2, half of the estimate of q.k that a key's ids allow.

q are the query's coarse coordinates (planes.py). Votes are 64 where the sum is 0. One vote is an eighth of the standard
deviation over random keys (d' = 128), and votes are clamped to 0 .. 127. The maximum over a group's heads counts. Tiers
(appendix B.2.1) rank keys within a subspace only. Sign votes weigh coordinates by the query's length in them, and need no
ranking, counting or lookups.

Bytes and operations, 8 KV heads, n = 1M, d = 128: the kernel reads the 16 id bytes of a key once for all query heads of a
group (134 MB, 31 us at 4300 GB/s). It writes one score byte. Lookups in shared-memory tables, where 32 random ones take 3.5
cycles, took 72 us. Instead tensor cores count the bits that a key and a plane share (bits.py). They take 16 keys by eight
columns (two planes of four heads) at once. The ids need only an exchange of bytes among four subspaces of four keys. A warp
takes 2.4 operations per key: 16 us on the whole GPU, overlapping the loads. This includes the score histogram, per chunk of
keys and in total, which is a bit product as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON, bits
from kvthaw.kernels.chain import dependent
from kvthaw.kernels.collide import BINS, CHUNK, Scores
from kvthaw.kernels.cut import row_stride
from kvthaw.kernels.encode import CENTROIDS, SUB
from kvthaw.kernels.planes import WIDE, unpack

TILE = 512
"""Keys that a program processes at once, 128 per warp."""


def shift(subs: int) -> int:
    """Return how many low bits of a sum to drop: one at d' = 128, where random keys have a standard deviation of 17."""
    return max(0, subs.bit_length() - 4)


def definition(planes: Tensor, ids: Tensor) -> Tensor:
    """Compute votes [L, H, n] int32. planes [L, H, S, 2, 8, R] uint8 from planes.pack; ids [L, H, B, n] uint8."""
    subs = ids.shape[2]
    numbers = unpack(planes, subs).transpose(3, 4).long()  # L, H, 4 S, B, 8
    bit = (torch.arange(CENTROIDS, device=ids.device) >> torch.arange(SUB, device=ids.device)[:, None]) & 1
    shares = (numbers[..., None] * bit).sum(dim=4)  # L, H, 4 S, B, 256
    lowest = shares.amin(dim=4, keepdim=True)
    start = lowest.sum(dim=(3, 4)) - (numbers.sum(dim=(3, 4)) >> 1)
    four = ((shares - lowest).unflatten(2, (-1, 4)) << (16 * torch.arange(4, device=ids.device))[:, None, None]).sum(dim=3)
    least = -bits.MIDDLE << shift(subs)
    best = torch.full((*ids.shape[:2], ids.shape[3]), least, dtype=torch.long, device=ids.device)
    for s in range(four.shape[2]):
        total = torch.zeros_like(best)
        for b in range(subs):  # one lookup for four heads, 16 bits of a word each
            total += four[:, :, s, b].gather(2, ids[:, :, b].long())
        for h in range(4):
            best = torch.maximum(best, ((total >> (16 * h)) & 0xFFFF) + start[:, :, 4 * s + h, None])
    return ((best - least) >> shift(subs)).clamp(max=BINS - 1).int()


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.chain import follow

    @triton.jit
    def _words(ids, at, t, stride, SUBS: tl.constexpr, HALVES: tl.constexpr):
        # Load the ids of four keys in subspaces 4 t .. 4 t + 3 of every 16; past the last subspace its ids again, which meet
        # zero planes.
        found = ()
        for i in tl.static_range(4 * HALVES):
            b = tl.minimum(i // 4 * 16 + 4 * t + i % 4, SUBS - 1)
            found += (tl.load(ids + b * stride + at),)  # type: ignore[assignment]
        return found

    @triton.jit
    def _number(planes, b, h, ROW: tl.constexpr):
        # Load the planes of head h in subspace b, as four bytes.
        k = tl.arange(0, 4)
        return tl.load(planes + (((h // 4) * 2 + k // 2) * 8 + 2 * (h % 4) + k % 2) * ROW + b).to(tl.int32)

    @triton.jit
    def _plainly(ids, planes, place, capacity, SUBS: tl.constexpr, ROW: tl.constexpr, FOURS: tl.constexpr,
                 SHIFT: tl.constexpr):  # fmt: skip
        # Compute bits.votes bit by bit.
        worth = tl.where(tl.arange(0, 4) < 3, 1 << tl.arange(0, 4), -8)
        best = tl.full(place.shape, -64 << SHIFT, tl.int32)
        for h in range(4 * FOURS):  # loops, for unrolled ones take minutes to compile
            total = tl.zeros(place.shape, tl.int32)
            every = tl.zeros((), tl.int32)
            for b in range(SUBS):
                id = tl.load(ids + b * capacity + place).to(tl.int32)
                plane = _number(planes, b, h, ROW)
                for j in tl.static_range(8):
                    number = tl.sum(worth * ((plane >> j) & 1))
                    total += number * ((id >> j) & 1)
                    every += number
            best = tl.maximum(best, total - (every >> 1))
        return tl.minimum((best >> SHIFT) + 64, 127)

    @triton.jit
    def _signs(ids, planes, lengths, scores, counts, totals, heads, words, chunks, SUBS: tl.constexpr, ROW: tl.constexpr,
               FOURS: tl.constexpr, SHIFT: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
               START: tl.constexpr, START_TYPES: tl.constexpr, VOTES: tl.constexpr, VOTES_TYPES: tl.constexpr,
               COUNT: tl.constexpr, COUNT_TYPES: tl.constexpr, PLAIN: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
        # Program: CHUNK keys of one KV head, TILE at a time, the next tile already loading. ids and planes are words of four
        # bytes, unless PLAIN.
        chunk = tl.program_id(0)
        pair = (tl.program_id(2) * heads + tl.program_id(1)).to(tl.int64)
        length = tl.load(lengths + tl.program_id(2))
        begin = chunk * CHUNK
        if begin >= length:
            follow(PDL)
        else:
            HALVES: tl.constexpr = ROW // 16
            e = tl.arange(0, TILE)
            counted = tl.zeros((BINS,), tl.int32)
            found = tl.zeros((TILE,), tl.int32)
            if PLAIN:
                follow(PDL)
                ids += pair * SUBS * (4 * words)
                planes += pair * (FOURS * 16 * ROW)
            else:
                t = e // 4 % 4  # index within the four threads that share the ids of 16 keys
                first_word = begin // 4 + e // 16 * 4 + e % 4
                ids += pair * SUBS * words
                word = _words(ids, first_word, t, words, SUBS, HALVES)
                follow(PDL)
                own = planes + pair * (FOURS * 4 * ROW) + e // 16 % 8 * (ROW // 4) + t
                plane = ()
                start = ()
                for four in tl.static_range(FOURS):
                    mine = ()
                    for i in tl.static_range(2 * HALVES):
                        at = (2 * four + i // HALVES) * 2 * ROW + i % HALVES * 4
                        mine += (tl.load(own + at),)  # type: ignore[assignment]
                    plane += mine
                    mine += (e,)  # type: ignore[assignment]
                    one = tl.inline_asm_elementwise(START, START_TYPES, mine, tl.int32, True, 4)
                    start += (one,)  # type: ignore[assignment]
            for first in tl.static_range(0, CHUNK, TILE):
                place = begin + first + e
                if PLAIN:
                    best = _plainly(ids, planes, place, 4 * words, SUBS, ROW, FOURS, SHIFT)
                else:
                    now = word
                    if first + TILE < CHUNK:
                        word = _words(ids, first_word + (first + TILE) // 4, t, words, SUBS, HALVES)
                    best = tl.inline_asm_elementwise(VOTES, VOTES_TYPES, now + plane + start + (e,), tl.int32, True, 4)
                if begin + CHUNK > length:
                    best = tl.where(place < length, best, 0)
                tl.store(scores + pair * (chunks * CHUNK) + place, best.to(tl.uint8))
                if PLAIN:
                    counted += tl.histogram(best, BINS)
                else:
                    found = tl.inline_asm_elementwise(COUNT, COUNT_TYPES, (best, found, e), tl.int32, True, 4)
            if not PLAIN:
                counted = tl.sum(tl.reshape(found, (TILE // BINS, BINS)), axis=0)
            bin = tl.arange(0, BINS)
            counted -= tl.where(bin == 0, tl.maximum(begin + CHUNK - length, 0), 0)
            above = tl.sum(counted) - (tl.cumsum(counted, axis=0) - counted)
            tl.store(counts + (pair * BINS + bin) * chunks + chunk, above)
            tl.atomic_add(totals + pair * BINS + bin, above, mask=above > 0, sem="relaxed")


def launch(planes: Tensor, ids: Tensor, lengths: Tensor, totals: Tensor) -> Scores:
    """Launch the kernel on any device, with plain bit arithmetic where it lacks the instructions. totals [L, H, BINS] int32
    must be zero."""
    batch, heads, fours, _, _, row = planes.shape
    subs, plain, apart = ids.shape[2], not bits.native(ids.device), row_stride(ids, rows=3)
    assert ids.shape[3] % CHUNK == apart % CHUNK == 0 and planes.is_contiguous() and totals.is_contiguous()
    assert ids.dtype == planes.dtype == torch.uint8 and lengths.dtype == totals.dtype == torch.int32
    assert totals.shape == (batch, heads, BINS) and row % WIDE == 0 and row >= subs
    chunks, halves, tile = ids.shape[3] // CHUNK, row // WIDE, CHUNK if plain else TILE
    scores = torch.empty((batch, heads, ids.shape[3]), dtype=torch.uint8, device=ids.device)
    counts = torch.empty((batch, heads, BINS, chunks), dtype=torch.int32, device=ids.device)
    start, votes, count = bits.start(halves), bits.votes(fours, halves, shift(subs)), bits.count()
    _signs[(chunks, heads, batch)](
        ids if plain else ids.view(torch.int32), planes if plain else planes.view(torch.int32), lengths, scores, counts, totals,
        heads, apart // 4, chunks, SUBS=subs, ROW=row, FOURS=fours, SHIFT=shift(subs), BINS=BINS, CHUNK=CHUNK, TILE=tile,
        START=start[0], START_TYPES=start[1], VOTES=votes[0], VOTES_TYPES=votes[1], COUNT=count[0], COUNT_TYPES=count[1],
        PLAIN=plain, num_warps=tile // 128, **dependent(ids.device),
    )  # fmt: skip
    return Scores(scores, counts, totals)


def signs(planes: Tensor, ids: Tensor, lengths: Tensor, totals: Tensor) -> Scores | Tensor:
    """As `collide.collide`. planes [L, H, S, 2, 8, R] uint8; ids [L', H, B, n] uint8, L' >= L, the first n places of a
    table; lengths [L'] int32, at most n; totals [L, H, BINS] int32 zeros, filled on a GPU."""
    if ids.is_cuda and HAS_TRITON:
        return launch(planes, ids, lengths, totals)
    return definition(planes, ids[: planes.shape[0]]).to(torch.uint8)
