"""The score of each candidate, estimated from its codes: |q| sum_b w_b <v_b, q~_b> (ParisKV, equation 10).

The rotated query is not normalised, so that |q| is in it already.

Bytes and operations, 8 KV heads, n = 128k, 10 % candidates, G = 4: 96 bytes a candidate in two pieces (10 MB, 2.4 us at 4200
GB/s), 4 bytes read and 4 G written (2 MB). A nibble is cut out, looked up in a table of 64 bytes that never conflicts (13.4 M
lookups, 3.2 k cycles over 132 multiprocessors, 2 us), weighed and rounded to bf16: six instructions, some 4 us in all. One word
is one subspace, decoded once for all query heads. The products are left to the tensor cores (8 or 16 columns of heads, 0.4
GFLOP), with the query in two bf16 parts beside each other, so that only the rounding of the decoded key stays, at most 2^-8 of
a coordinate.

Beside the scores a program leaves, of each head, the largest score of every few candidates, so that the next step can pass over
most of them, and the maximum and the sum of exponentials of all its candidates, so that it can weigh the heads of a group
against each other. Tiles go to the programs in turns: what a program sums does not depend on the room there is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.chain import chained
from kvthaw.kernels.encode import Quantizer, Summaries, decode

TILE = 64
"""Candidates that a program takes at once."""
SPLITS = 64
"""Programs a KV head."""
STAGES, WARPS = 2, 4


@dataclass(frozen=True, slots=True)
class Estimates:
    """scores [L, H, P, width] float32 estimates of q.k, -inf (from the launcher: anything) where there is no candidate.

    Filled by the launcher alone: parts [L, H, P, SPLITS, 2] float32, maximum and sum of exponentials of scale x score over
    every SPLITS-th tile; peaks [L, H, P, ceil(width / TILE) TILE / run] float32, the largest score of `run` candidates side by
    side, anything behind the last candidate's."""

    scores: Tensor
    parts: Tensor | None = None
    peaks: Tensor | None = None
    run: int = TILE


def definition(rotated: Tensor, codes: Tensor, weights: Tensor, candidates: Tensor, quantizer: Quantizer) -> Tensor:
    """Estimates [L, H, P, width] float32; -inf where candidates [L, H, width] is -1.

    rotated [L, H, P, 8, B] float32; codes [L, H, n, B] int32; weights [L, H, n, B] bfloat16.
    """
    at = candidates.clamp(min=0).long()[..., None].expand(-1, -1, -1, codes.shape[3])
    directions = decode(codes.gather(2, at), quantizer) * weights.gather(2, at).float()[..., None]  # [L, H, width, B, 8]
    flat = rotated.transpose(3, 4).flatten(3)
    scores = torch.matmul(flat, directions.flatten(3).transpose(2, 3))
    return scores.masked_fill(candidates[:, :, None] < 0, -torch.inf)


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.chain import follow

    @triton.jit
    def _rerank(rotated, codes, weights, levels, candidates, wanted, scores, peaks, parts, heads, capacity, width, scale,
                P: tl.constexpr, PP: tl.constexpr, SUBS: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr,
                UPCAST: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
        # One program: every SPLITS-th tile of candidates of one KV head, for all its query heads.
        split = tl.program_id(0)
        splits = tl.num_programs(0)
        lane = tl.program_id(2)
        pair = (lane * heads + tl.program_id(1)).to(tl.int64)
        count = tl.load(wanted + lane)
        b = tl.arange(0, SUBS)
        i = tl.arange(0, SUBS * 8)
        p = tl.arange(0, PP)
        head = (p < P)[None, :]
        level = tl.load(levels + tl.arange(0, 16))
        follow(PDL)
        n = tl.arange(0, 2 * PP)  # heads, then heads again: one product with both parts of the query, not two in a row
        runs = tl.cdiv(width, TILE) * (TILE // RUN)
        source = rotated + (pair * P + (n % PP)[None, :]) * 8 * SUBS + (i % 8 * SUBS + i // 8)[:, None]
        query = tl.load(source, mask=(n % PP < P)[None, :], other=0.0)
        high = query.to(tl.bfloat16)
        parted = tl.where((n < PP)[None, :], high, (query - high.to(tl.float32)).to(tl.bfloat16))
        if UPCAST:
            parted = parted.to(tl.float32)
        top = tl.full((TILE, PP), float("-inf"), tl.float32)
        mass = tl.zeros((TILE, PP), tl.float32)
        for tile in tl.range(split, tl.cdiv(count, TILE), splits, num_stages=STAGES):
            m = tile * TILE + tl.arange(0, TILE)
            live = (m < count)[:, None]
            place = tl.load(candidates + pair * width + m, mask=m < count, other=0)
            at = (pair * capacity + place)[:, None] * SUBS + b[None, :]
            word = tl.load(codes + at)
            weight = tl.load(weights + at).to(tl.float32)
            even = tl.join(tl.join(word, word >> 16), tl.join(word >> 8, word >> 24))
            odd = tl.join(tl.join(word >> 4, word >> 20), tl.join(word >> 12, word >> 28))
            nibble = tl.reshape(tl.join(even, odd) & 15, (TILE * SUBS * 8,))  # in the order of the coordinates
            key = tl.reshape(tl.gather(level, nibble, 0), (TILE, SUBS, 8)) * weight[:, :, None]
            key = tl.reshape(key.to(tl.bfloat16), (TILE, SUBS * 8))
            if UPCAST:
                key = key.to(tl.float32)
            score = tl.sum(tl.reshape(tl.dot(key, parted), (TILE, 2, PP)), axis=1)
            tl.store(scores + (pair * P + p[None, :]) * width + m[:, None], score, mask=head & live)
            score = tl.where(live, score, float("-inf"))
            peak = tl.max(tl.reshape(score, (TILE // RUN, RUN, PP)), axis=1)
            run = tile * (TILE // RUN) + tl.arange(0, TILE // RUN)
            tl.store(peaks + (pair * P + p[None, :]) * runs + run[:, None], peak, mask=head)
            logit = score * scale
            new = tl.maximum(top, logit)
            safe = tl.where(new == float("-inf"), 0.0, new)
            mass = mass * tl.exp(top - safe) + tl.exp(logit - safe)
            top = new
        whole = tl.max(top, axis=0)
        safe = tl.where(whole == float("-inf"), 0.0, whole)
        part = parts + ((pair * P + p) * splits + split) * 2
        tl.store(part, whole, mask=p < P)
        tl.store(part + 1, tl.sum(mass * tl.exp(top - safe[None, :]), axis=0), mask=p < P)


def launch(rotated: Tensor, summaries: Summaries, candidates: Tensor, wanted: Tensor, quantizer: Quantizer, scale: float,
           run: int = TILE) -> Estimates:  # fmt: skip
    """The kernel, on whatever device candidates are. run: a power of two up to TILE."""
    lanes, heads, scored, _, subs = rotated.shape
    width = candidates.shape[2]
    assert rotated.is_contiguous() and candidates.is_contiguous() and wanted.dtype == candidates.dtype == torch.int32
    assert summaries.codes.is_contiguous() and summaries.weights.is_contiguous() and rotated.dtype == torch.float32
    assert TILE % run == 0, f"{run} candidates do not divide a tile"
    pdl = chained(candidates.device)
    runs = triton.cdiv(width, TILE) * (TILE // run)
    scores, parts, peaks = (
        torch.empty((lanes, heads, scored, *size), dtype=torch.float32, device=candidates.device)
        for size in ((width,), (SPLITS, 2), (runs,))
    )
    _rerank[(SPLITS, heads, lanes)](
        rotated, summaries.codes, summaries.weights, quantizer.levels, candidates, wanted, scores, peaks, parts, heads,
        summaries.capacity, width, scale, P=scored, PP=max(8, triton.next_power_of_2(scored)), SUBS=subs, TILE=TILE, RUN=run,
        UPCAST=candidates.device.type == "cpu", STAGES=STAGES, PDL=pdl, num_warps=WARPS,
        launch_pdl=pdl,
    )  # fmt: skip
    return Estimates(scores, parts, peaks, run)


def rerank(rotated: Tensor, summaries: Summaries, candidates: Tensor, wanted: Tensor, quantizer: Quantizer, scale: float,
           run: int = TILE) -> Estimates:  # fmt: skip
    """Estimated scores of candidates [L, H, width], the first wanted[l] of each row. scale: of the softmax, for the parts; run:
    see Estimates."""
    if candidates.is_cuda and HAS_TRITON:
        return launch(rotated, summaries, candidates, wanted, quantizer, scale, run)
    lanes = rotated.shape[0]
    return Estimates(definition(rotated, summaries.codes[:lanes], summaries.weights[:lanes], candidates, quantizer))
