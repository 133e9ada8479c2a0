"""The score of each candidate, estimated from its codes: |q| sum_b w_b <v_b, q~_b> (ParisKV, equation 10).

The rotated query is not normalised, so that |q| is in it already.

Bytes and operations, 8 KV heads, n = 128k, 10 % candidates, G = 4: 96 bytes a candidate in two pieces (10 MB, 2.4 us at 4300
GB/s), 4 bytes read and 4 G written (2 MB). 128 table lookups a candidate, from a table of 64 bytes that never conflicts (13.4
M, 3.2 k cycles over 132 multiprocessors, 2 us), and 128 G multiply-adds (54 M, 2 us). One word is one subspace, so a thread
holds whole subspaces and a candidate's codes are decoded once for all query heads.

Beside the scores a program leaves the maximum and the sum of exponentials of its candidates, so that the next step can weigh
the heads of a group against each other without another pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.encode import Quantizer, Summaries, decode

TILE = 64
"""Candidates a program."""


@dataclass(frozen=True, slots=True)
class Estimates:
    """scores [L, H, P, width] float32 estimates of q.k, -inf (from the launcher: anything) where there is no candidate. parts
    [L, H, P, tiles, 2] float32: maximum and sum of exponentials of scale x score, filled by the launcher alone."""

    scores: Tensor
    parts: Tensor | None = None


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

    @triton.jit
    def _rerank(rotated, codes, weights, levels, candidates, wanted, scores, parts, heads, capacity, width, tiles, scale,
                P: tl.constexpr, SUBS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
        # One program: TILE candidates of one KV head, for all its query heads.
        tile = tl.program_id(0)
        lane = tl.program_id(2)
        pair = (lane * heads + tl.program_id(1)).to(tl.int64)
        count = tl.load(wanted + lane)
        if tile * TILE < count:
            m = tile * TILE + tl.arange(0, TILE)
            live = m < count
            b = tl.arange(0, SUBS)
            place = tl.load(candidates + pair * width + m, mask=live, other=0)
            at = (pair * capacity + place)[:, None] * SUBS + b[None, :]
            word = tl.load(codes + at)
            weight = tl.load(weights + at).to(tl.float32)
            v0 = tl.load(levels + (word & 15)) * weight
            v1 = tl.load(levels + ((word >> 4) & 15)) * weight
            v2 = tl.load(levels + ((word >> 8) & 15)) * weight
            v3 = tl.load(levels + ((word >> 12) & 15)) * weight
            v4 = tl.load(levels + ((word >> 16) & 15)) * weight
            v5 = tl.load(levels + ((word >> 20) & 15)) * weight
            v6 = tl.load(levels + ((word >> 24) & 15)) * weight
            v7 = tl.load(levels + ((word >> 28) & 15)) * weight
            for p in tl.static_range(P):
                q = rotated + (pair * P + p) * 8 * SUBS + b
                dot = v0 * tl.load(q)[None, :] + v1 * tl.load(q + SUBS)[None, :]
                dot += v2 * tl.load(q + 2 * SUBS)[None, :] + v3 * tl.load(q + 3 * SUBS)[None, :]
                dot += v4 * tl.load(q + 4 * SUBS)[None, :] + v5 * tl.load(q + 5 * SUBS)[None, :]
                dot += v6 * tl.load(q + 6 * SUBS)[None, :] + v7 * tl.load(q + 7 * SUBS)[None, :]
                score = tl.sum(dot, axis=1)
                tl.store(scores + (pair * P + p) * width + m, score, mask=live)
                logit = tl.where(live, score * scale, float("-inf"))
                top = tl.max(logit, axis=0)
                part = parts + ((pair * P + p) * tiles + tile) * 2
                tl.store(part, top)
                tl.store(part + 1, tl.sum(tl.exp(logit - top), axis=0))


def launch(rotated: Tensor, summaries: Summaries, candidates: Tensor, wanted: Tensor, quantizer: Quantizer,
           scale: float) -> Estimates:  # fmt: skip
    """The kernel, on whatever device candidates are."""
    lanes, heads, scored, _, subs = rotated.shape
    width, tiles = candidates.shape[2], triton.cdiv(candidates.shape[2], TILE)
    assert rotated.is_contiguous() and candidates.is_contiguous() and wanted.dtype == candidates.dtype == torch.int32
    assert summaries.codes.is_contiguous() and summaries.weights.is_contiguous() and rotated.dtype == torch.float32
    scores = torch.empty((lanes, heads, scored, width), dtype=torch.float32, device=candidates.device)
    parts = torch.empty((lanes, heads, scored, tiles, 2), dtype=torch.float32, device=candidates.device)
    _rerank[(tiles, heads, lanes)](
        rotated, summaries.codes, summaries.weights, quantizer.levels, candidates, wanted, scores, parts, heads,
        summaries.capacity, width, tiles, scale, P=scored, SUBS=subs, TILE=TILE, num_warps=4,
    )  # fmt: skip
    return Estimates(scores, parts)


def rerank(rotated: Tensor, summaries: Summaries, candidates: Tensor, wanted: Tensor, quantizer: Quantizer,
           scale: float) -> Estimates:  # fmt: skip
    """Estimated scores of candidates [L, H, width], the first wanted[l] of each row. scale: of the softmax, for the parts."""
    if candidates.is_cuda and HAS_TRITON:
        return launch(rotated, summaries, candidates, wanted, quantizer, scale)
    lanes = rotated.shape[0]
    return Estimates(definition(rotated, summaries.codes[:lanes], summaries.weights[:lanes], candidates, quantizer))
