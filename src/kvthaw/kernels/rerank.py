"""Estimate the score of each candidate from its codes: |q| sum_b w_b <v_b, q~_b> (ParisKV, equation 10).

The rotated query is not normalised, so it includes |q|. It comes as bytes (query.py), as do the levels of the codes
(encode.py), so <v_b, q_b> is an integer product.

Bytes and operations, 8 KV heads, n = 1M, 10 % candidates, G = 4. Codes of 4 bits: 96 bytes per candidate in two pieces (81 MB,
19 us at 4300 GB/s; the scattered reads alone were measured at 33 us). Codes of 3 bits: 64 aligned bytes (54 MB, 12 us). For
both, 4 bytes read and 4 G written (17 MB).

Five operations turn four nibbles of 4 bits into four signed bytes: one byte permutation looks up their levels, another spreads
their signs. Nibbles of 3 bits take two: the permutation looks up signed levels. Six more take the weight of eight out of their
word. Tensor cores compute the products, 32 coordinates of four subspaces at a time. Each subspace and head has a column that is
zero in the other three subspaces. The sums therefore stay separate and are weighted afterwards. The accumulators start at 2^23 +
2^22, so that they are float32 bit patterns, up to half a unit that a sum may lose. Compiled for sm_90, a warp executes 22
instructions per candidate with 4 bits and 19 with 3: 18 and 15 us. A program is a single warp, so nothing waits at barriers, and
it loads the next candidates' codes before it decodes the current ones.

A program also stores, per head, the maximum of every few candidates, so that top-k can skip most of them. It stores the
maximum and the sum of exponentials of all its candidates too; top-k weighs the heads of a group with them. Programs take
tiles round-robin. A program's sum therefore depends on the number of programs, which follows from `run`, and not on the
buffer's width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.chain import dependent
from kvthaw.kernels.encode import Quantizer, Summaries
from kvthaw.kernels.gpu import nvidia
from kvthaw.kernels.query import Rotated

TILE = 64
"""The width of candidate buffers is a multiple of this, and runs that share a peak divide it."""


@dataclass(frozen=True, slots=True)
class Estimates:
    """Estimated scores of candidates, with what top-k needs to skip and to weigh them, as a launcher leaves them.

    scores: [L, H, P, width] float32, estimates of q.k, undefined without a candidate.
    parts: [L, H, P, programs, 2] float32, each program's maximum and sum of exponentials of scale x score.
    peaks: [L, H, P, ceil(width / TILE) TILE / run] float32, the maximum over each `run` consecutive candidates, undefined
        past the last candidate.
    """

    scores: Tensor
    parts: Tensor
    peaks: Tensor
    run: int

    @classmethod
    def empty(cls, queries: tuple[int, int, int], width: int, programs: int, run: int, device: torch.device) -> Estimates:
        """Allocate what a kernel fills, for queries [L, H, P]."""
        sizes = (width,), (programs, 2), (-(-width // TILE) * (TILE // run),)
        scores, parts, peaks = (torch.empty((*queries, *size), dtype=torch.float32, device=device) for size in sizes)
        return cls(scores, parts, peaks, run)


def shape(run: int) -> tuple[int, int]:
    """Return the candidates per program at once, a multiple of `run`, and the programs per KV head.

    Measured for 8 KV heads: few enough to run in one wave. Runs are longer the more candidates there are.
    """
    return (16, 192) if run <= 16 else (max(32, run), 128)


def gathered(summaries: Summaries, candidates: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    """Return directions [L, H, width, B, 8] and weights [L, H, width, B], float32, of candidates [L, H, width] in the first L
    sequences. A candidate -1 has key 0's."""
    at = candidates.clamp(min=0).long()[..., None].expand(-1, -1, -1, summaries.codes.shape[3])
    batch, table = len(candidates), summaries.weights
    words = summaries.codes[:batch].gather(2, at)
    return quantizer.directions(words), quantizer.weights(words, None if table is None else table[:batch].gather(2, at))


def definition(rotated: Rotated, summaries: Summaries, candidates: Tensor, quantizer: Quantizer) -> Tensor:
    """Compute estimates [L, H, P, width] float32; -inf where candidates [L, H, width] is -1."""
    directions, weights = gathered(summaries, candidates, quantizer)
    directions = directions * weights[..., None]
    scores = torch.matmul(rotated.rounded().flatten(3), directions.flatten(3).transpose(2, 3))
    return scores.masked_fill(candidates[:, :, None] < 0, -torch.inf)


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.chain import follow
    from kvthaw.kernels.parts import accumulate, store_part

    @triton.jit
    def _decoded(x, low, high, BITS: tl.constexpr, PLAIN: tl.constexpr):
        # Return the levels of the lowest four nibbles of x as bytes v, or ~v for negative levels. x [S, TILE, 4, 2, 4] int32
        # holds each value four times.
        if PLAIN:
            j = tl.arange(0, 4)[None, None, None, None, :]
            nibble = x >> (4 * j)
            found = (tl.where(nibble & 4 > 0, high, low) >> (8 * (nibble & 3))).to(tl.int8)
            if BITS == 4:
                found = tl.where(nibble & 8 > 0, -1 - found, found)
        elif BITS == 3:
            found = tl.inline_asm_elementwise(
                """{
                .reg .b32 number;
                and.b32 number, $1, 0x7777;
                prmt.b32 $0, $5, $9, number;
                }""",
                "=r,r,r,r,r,r,r,r,r,r,r,r,r", [x, low, high], tl.int8, True, 4,
            )  # fmt: skip
        else:
            found = tl.inline_asm_elementwise(
                """{
                .reg .b32 number, level, up, sign;
                and.b32 number, $1, 0x7777;
                prmt.b32 level, $5, $9, number;
                shl.b32 up, $1, 4;
                prmt.b32 sign, up, $1, 0xd9c8;
                xor.b32 $0, level, sign;
                }""",
                "=r,r,r,r,r,r,r,r,r,r,r,r,r", [x, low, high], tl.int8, True, 4,
            )  # fmt: skip
        return found

    @triton.jit
    def _summary(table, at, SUBS: tl.constexpr):
        # Load what a table has of the keys at `at`, [TILE, SUBS or 4], 0 past the last subspace.
        b = tl.arange(0, SUBS if SUBS > 4 else 4)[None, :]
        return tl.load(table + at[:, None] * SUBS + b, mask=(b < SUBS) if SUBS < 4 else None, other=0 if SUBS < 4 else None)

    @triton.jit
    def _weight(x):
        # Return weights in words as float32, times 2^-LARGEST: the tops of eight nibbles become exponent and mantissa.
        pairs = ((x & -0x7F7F7F80) | ((x << 3) & 0x40404040)) & -0x3F3F3F40
        byte = pairs * ((1 << 18) | (1 << 12) | (1 << 6) | 1)  # in bits 24 .. 31; the pairs meet nowhere
        return (((byte >> 4) & 0x0FF00000) | 0x30000000).to(tl.float32, bitcast=True)

    @triton.jit
    def _rerank(whole, factors, codes, weights, candidates, wanted, scores, peaks, parts, heads, capacity, width, low, high,
                scale, UNIT: tl.constexpr, BITS: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, SUBS: tl.constexpr,
                TILE: tl.constexpr, ROOM: tl.constexpr, RUN: tl.constexpr, PLAIN: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
        # Program: every num_programs-th tile of candidates of one KV head, for all its query heads.
        split = tl.program_id(0)
        splits = tl.num_programs(0)
        seq = tl.program_id(2)
        pair = (seq * heads + tl.program_id(1)).to(tl.int64)
        count = tl.load(wanted + seq)
        p = tl.arange(0, PP)
        part = parts + ((pair * P + p) * splits + split) * 2
        if split * TILE >= count:  # as if it had summed up nothing
            follow(PDL)
            tl.store(part, tl.full((PP,), float("-inf"), tl.float32), mask=p < P)
            tl.store(part + 1, tl.zeros((PP,), tl.float32), mask=p < P)
        else:
            S: tl.constexpr = SUBS // 4 if SUBS > 4 else 1  # products, each of the four subspaces t S + s, t = 0 .. 3
            MAGIC: tl.constexpr = 12582912.0
            head = (p < P)[None, :]
            r = tl.arange(0, TILE)
            k = tl.arange(0, 32)  # t and the coordinate
            n = tl.arange(0, 4 * PP)  # upper bit of t, head, lower bit of t
            mine, p_of = n // (2 * PP) * 2 + n % 2, n // 2 % PP
            sub = mine[None, :] * S + tl.arange(0, S)[:, None]
            row = (pair * P + p_of)[None, :] * SUBS + sub
            real = (p_of < P)[None, :] & (sub < SUBS)
            factor = tl.load(factors + row, mask=real, other=0.0) * UNIT  # [S, N]
            own = real[:, :, None] & ((k // 8)[None, :] == mine[:, None])[None, :, :]
            query = tl.load(whole + row[:, :, None] * 8 + (k % 8)[None, None, :], mask=own, other=0)
            less = factor * MAGIC - factor * (0.5 * tl.sum(query.to(tl.int32), axis=2).to(tl.float32))  # a level is v + 1/2
            query = tl.permute(query, (0, 2, 1))
            follow(PDL)  # the kernel before the previous one wrote the rotated queries
            runs = ROOM // RUN * tl.cdiv(width, ROOM)
            top = tl.full((TILE, PP), float("-inf"), tl.float32)
            mass = tl.zeros((TILE, PP), tl.float32)
            start = tl.full((S, TILE, 4 * PP), 0x4B400000, tl.int32)
            m = split * TILE + r
            place = tl.load(candidates + pair * width + m, mask=m < count, other=0)
            word = _summary(codes, pair * capacity + place, SUBS)
            weight = _summary(weights, pair * capacity + place, SUBS) if BITS == 4 else word
            place = tl.load(candidates + pair * width + m + splits * TILE, mask=m + splits * TILE < count, other=0)
            for tile in tl.range(split, tl.cdiv(count, TILE), splits, num_stages=1):
                m = tile * TILE + r
                live = (m < count)[:, None]
                next_word = _summary(codes, pair * capacity + place, SUBS)
                next_weight = _summary(weights, pair * capacity + place, SUBS) if BITS == 4 else next_word
                later = m + 2 * splits * TILE
                place = tl.load(candidates + pair * width + later, mask=later < count, other=0)
                half = tl.join(word, word >> 16)
                half = tl.join(half, half)  # not a broadcast, which the compiler would move past the decoding
                half = tl.reshape(tl.join(half, half), (TILE, 4, S, 2, 4))
                key = tl.reshape(_decoded(tl.permute(half, (2, 0, 1, 3, 4)), low, high, BITS, PLAIN), (S, TILE, 32))
                if PLAIN:  # exact, and Triton has no int8 products before sm_80
                    sums = start + tl.dot(key.to(tl.float16), query.to(tl.float16)).to(tl.int32)
                else:
                    sums = tl.dot(key, query, start, out_dtype=tl.int32)
                sums = sums.to(tl.float32, bitcast=True)
                sums = tl.reshape(sums * factor[:, None, :] - less[:, None, :], (S, TILE, 2, PP, 2))
                weight = weight.to(tl.float32) if BITS == 4 else _weight(word)
                weigh = tl.permute(tl.reshape(weight, (TILE, 4, S)), (2, 0, 1))
                sums = tl.sum(sums * tl.reshape(weigh, (S, TILE, 2, 1, 2)), axis=0)
                score = tl.sum(tl.sum(sums, axis=3), axis=1)
                at = scores + (pair * P + p[None, :]) * width + m[:, None]
                tl.store(at, score, mask=head & live)
                score = tl.where(live, score, float("-inf"))
                peak = tl.max(tl.reshape(score, (TILE // RUN, RUN, PP)), axis=1)
                run = tile * (TILE // RUN) + tl.arange(0, TILE // RUN)
                tl.store(peaks + (pair * P + p[None, :]) * runs + run[:, None], peak, mask=head)
                top, mass = accumulate(top, mass, score * scale)
                word, weight = next_word, next_weight
            store_part(part, top, mass, p < P)


def launch(rotated: Rotated, summaries: Summaries, candidates: Tensor, wanted: Tensor, quantizer: Quantizer, scale: float,
           run: int = TILE) -> Estimates:  # fmt: skip
    """Launch the kernel on any device.

    run: a power of two up to TILE.
    """
    batch, heads, scored, subs = rotated.factors.shape
    width = candidates.shape[2]
    assert rotated.whole.is_contiguous() and rotated.factors.is_contiguous()
    assert summaries.contiguous() and candidates.is_contiguous() and wanted.dtype == candidates.dtype == torch.int32
    assert TILE % run == 0, f"{run} candidates do not divide a tile"
    tile, splits = shape(run)
    found = Estimates.empty((batch, heads, scored), width, splits, run, candidates.device)
    _rerank[(splits, heads, batch)](
        rotated.whole, rotated.factors, summaries.codes, summaries.weights, candidates, wanted, found.scores, found.peaks,
        found.parts, heads, summaries.capacity, width, *quantizer.bytes, scale, UNIT=quantizer.unit / 128, BITS=quantizer.bits,
        P=scored, PP=max(2, triton.next_power_of_2(scored)), SUBS=subs, TILE=tile, ROOM=TILE, RUN=run,
        PLAIN=not nvidia(candidates.device, (8, 0)), num_warps=1, **dependent(candidates.device),
    )  # fmt: skip
    return found


def rerank(rotated: Rotated, summaries: Summaries, candidates: Tensor, wanted: Tensor, quantizer: Quantizer, scale: float,
           run: int = TILE) -> Estimates | Tensor:  # fmt: skip
    """Estimate the scores of candidates [L, H, width], the first wanted[l] of each row. Off a GPU, as `definition`.

    scale: of the softmax, for the parts.
    run: see Estimates.
    """
    if candidates.is_cuda and HAS_TRITON:
        return launch(rotated, summaries, candidates, wanted, quantizer, scale, run)
    return definition(rotated, summaries, candidates, quantizer)
