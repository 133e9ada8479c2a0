"""Select the k best candidates of each KV head by their estimated softmax weights.

The query heads of a group combine by the maximum or the mean of their softmax weights over the candidates, in logs; the
estimates of a single head rank as they are. Ties go to the lowest position.

Bytes and operations, 8 KV heads, 13k candidates, G = 4, k = 100: one program per KV head. The k best candidates are in the
k runs of 16 with the highest peaks. So it reads 13 KB of peaks and 32 KB of runs out of 210 KB of estimates, four numbers
per load. At 1M tokens, with runs of 32, it reads 53 and 64 KB of 1.7 MB. The k-th largest is found in registers by
narrowing an interval: each round counts the numbers above two thresholds in it, until exactly k are above. That takes 9
rounds of 0.15 us. The second search starts at the k-th peak, which leaves few more than k candidates, and takes half the
rounds. A sort would touch each candidate 17 times. With eight programs there is one warp per scheduler, so the time is the
number of dependent instructions: numbers have 32 bits and all loads are issued at once. With "mean" torch adds up the heads'
weights before the launch, because a run's largest sum does not follow from its peaks.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvthaw.errors import ConfigError
from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.bucket_topk import compact
from kvthaw.kernels.chain import dependent
from kvthaw.kernels.rerank import TILE, Estimates

Merge = Literal["max", "mean"]
"""How the query heads of a group agree on candidates: by the largest or the mean of their softmax weights."""
MOST = 16384
"""Maximum number of runs, and of candidates in chosen runs, that a program holds; torch sorts if there are more."""
PER_WARP = 256
"""How many of them a warp holds."""


@dataclass(frozen=True, slots=True)
class Floor:
    """Rows that weigh too little are not selected. A weight is a share of the exponentials of candidates, sink and ring.

    least: the log of the least weight.
    held: for each query head the log of the sum of exponentials over sink and ring, [L, H, P] float32.
    lengths: the tokens of each sequence, [L] int32.
    whole: a sequence of at most this many tokens keeps all rows.
    """

    least: float
    held: Tensor
    lengths: Tensor
    whole: int


def run_length(width: int, k: int) -> int | None:
    """Choose the candidates per peak so that a program holds the fewest peaks of `width` candidates plus candidates of k runs.

    Both are rounded up to powers of two of at most MOST. The longest of equally good run lengths; None if none fits.
    """

    def held(run: int) -> tuple[int, int]:
        peaks = -(-width // TILE) * (TILE // run)
        return 1 << (peaks - 1).bit_length(), run << (k - 1).bit_length()

    possible = [run for run in (64, 32, 16, 8, 4) if max(held(run)) <= MOST]
    return min(possible, key=lambda run: sum(held(run)), default=None)


def merge(scores: Tensor, scale: float, policy: Merge, held: Tensor | None = None) -> Tensor:
    """Merge estimates of q.k [L, H, P, width] over the heads: log of the largest or summed softmax weight, [L, H, width]. -inf
    stays. held [L, H, P]: log of the exponentials' sum over other tokens, which the softmax covers too."""
    if scores.shape[2] == 1 and held is None:
        return scores[:, :, 0]
    logits = scores * scale
    total = torch.logsumexp(logits, dim=3, keepdim=True)
    if held is not None:
        total = torch.logaddexp(total, held[..., None])
    weight = logits - torch.where(total == -torch.inf, 0.0, total)
    return weight.amax(dim=2) if policy == "max" else torch.logsumexp(weight, dim=2)


def _ordered(number: float) -> int:
    """Return a float32's bits as an integer of the same order."""
    (bits,) = struct.unpack("i", struct.pack("f", number))
    return bits ^ 0x7FFFFFFF if bits < 0 else int(bits)


def heaviest(merged: Tensor, candidates: Tensor, k: int, floor: Floor | None = None) -> Tensor:
    """Return which of the candidates are the k largest of merged, bool [L, H, width]; -1 pads candidates."""
    order = torch.sort(merged, dim=2, descending=True, stable=True).indices[:, :, :k]
    keep = torch.zeros_like(candidates, dtype=torch.bool).scatter_(2, order, True) & (candidates >= 0)
    if floor is not None:
        keep &= (merged >= floor.least) | (floor.lengths <= floor.whole)[:, None, None]
    return keep


def positions(keep: Tensor, candidates: Tensor, k: int, first: int) -> tuple[Tensor, Tensor]:
    """Return rows and counts, as `topk` does, of the candidates to keep, at most k for each head."""
    at = compact(keep, k)
    rows = torch.where(at >= 0, candidates.gather(2, at.clamp(min=0).long()) + first, -1)
    return rows.int(), keep.sum(dim=2).int()


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.chain import follow

    @triton.jit
    def _total(parts, P: tl.constexpr, PP: tl.constexpr, SPLITS: tl.constexpr):
        # Return the log of each head's sum of exponentials over all candidates, finite if there are none.
        head = tl.arange(0, PP)[:, None]
        split = tl.arange(0, triton.next_power_of_2(SPLITS))[None, :]
        there = (head < P) & (split < SPLITS)
        part = parts + (head * SPLITS + split) * 2
        tops = tl.load(part, mask=there, other=float("-inf"))
        mass = tl.load(part + 1, mask=there, other=0.0)  # issued before waiting for the first load
        top = tl.maximum(tl.max(tops, axis=1), -3.0e38)
        mass *= tl.exp(tops - top[:, None])
        return top + tl.log(tl.maximum(tl.sum(mass, axis=1), 1.0e-30))

    @triton.jit
    def _with_held(total, held, P: tl.constexpr, PP: tl.constexpr, FLOOR: tl.constexpr):
        # Add other tokens' exponentials to each head's sum, in logs.
        if FLOOR:
            head = tl.arange(0, PP)
            more = tl.load(held + head, mask=head < P, other=-3.0e38)
            top = tl.maximum(total, more)
            total = top + tl.log(tl.exp(total - top) + tl.exp(more - top))
        return total

    @triton.jit
    def _each(total, P: tl.constexpr, PP: tl.constexpr):
        # Return the first P of PP numbers as scalars.
        found = ()
        for p in tl.static_range(P):
            found += (tl.sum(tl.where(tl.arange(0, PP) == p, total, 0.0)),)  # type: ignore[assignment]
        return found

    @triton.jit
    def _heads(scores, at, there, stride, P: tl.constexpr):
        # Load the numbers at `at` of each head. there: a mask coarse enough for vector loads of four.
        found = ()
        for p in tl.static_range(P):
            found += (tl.load(scores + p * stride + at, mask=there, other=float("-inf")),)  # type: ignore[assignment]
        return found

    @triton.jit
    def _keys(scores, live, totals, scale, P: tl.constexpr, PLAIN: tl.constexpr):
        # Return the largest weight of a group's heads as an integer of the same order; the smallest integer where not live.
        # PLAIN: a single head's scores are its weights.
        merged = scores[0] if PLAIN else scores[0] * scale - totals[0]
        for p in tl.static_range(1, P):
            merged = tl.maximum(merged, scores[p] * scale - totals[p])
        bits = (merged + 0.0).to(tl.int32, bitcast=True)
        return tl.where(live, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), -0x80000000)

    @triton.jit
    def _bounds(key, want, low, high):
        # Search between low, which at least `want` keys reach, and high, which fewer reach, for the highest and lowest such
        # numbers, or any pair that separates exactly `want` keys. Also returns how many keys reach high. Each round tries two
        # thresholds, counted in the halves of a word.
        least, more = tl.sum((key >= low).to(tl.int32)), 0
        between = (high - low).to(tl.uint32)  # unsigned, as it may exceed an int32
        while (least > want) & (between > 1):
            first = low + ((between >> 2) + (between >> 4)).to(tl.int32)
            second = low + ((between >> 1) + (between >> 3) + (between >> 4)).to(tl.int32)  # strictly between low and high
            found = tl.sum((key >= first).to(tl.int32) + ((key >= second).to(tl.int32) << 16))
            one, two = found & 0xFFFF, found >> 16
            high = tl.where(two >= want, high, tl.where(one >= want, second, first))
            more = tl.where(two >= want, more, tl.where(one >= want, two, one))
            low = tl.where(two >= want, second, tl.where(one >= want, first, low))
            least = tl.where(two >= want, two, tl.where(one >= want, one, least))
            between = (high - low).to(tl.uint32)
        return low, high, more

    @triton.jit
    def _places(key, want, low, high, more):
        # Return the rank, by position, of each of the `want` largest keys, -1 for all others. The first of equal keys are
        # preferred.
        one = (key >= high).to(tl.int32)
        same = (key >= low).to(tl.int32) - one
        both = tl.cumsum(one + (same << 16), axis=0)  # both ranks, in the halves of a word
        above, tie = (both & 0xFFFF) - one, (both >> 16) - same
        quota = want - more
        return tl.where(one + same * (tie < quota).to(tl.int32) > 0, above + tl.minimum(tie, quota), -1)

    @triton.jit
    def _choose(scores, own, peaks, parts, candidates, wanted, held, chosen, rows, counts, lengths, heads, width, runs, scale, k,
                first, bound, whole, P: tl.constexpr, PP: tl.constexpr, SPLITS: tl.constexpr, RUN: tl.constexpr,
                RUNS: tl.constexpr, KP: tl.constexpr, PLAIN: tl.constexpr, FLOOR: tl.constexpr, HEADS: tl.constexpr,
                PDL: tl.constexpr):  # fmt: skip
        # Program: one KV head. Selects the k best runs by their peaks, then the k best candidates of those runs, which lie
        # between the k-th peak and the first. Both bounds are widened by the rounding error of computing the same sums twice.
        # With a floor, it wants no more candidates than reach `bound`, a number as _keys makes them. own: the scores of single
        # heads, which it sets to -inf for the rows.
        seq = tl.program_id(1)
        pair = (seq * heads + tl.program_id(0)).to(tl.int64)
        count = tl.load(wanted + seq)
        filled = tl.cdiv(count, RUN)
        follow(PDL)
        run = tl.arange(0, RUNS)
        peak = _heads(peaks + pair * P * runs, run, run < runs, runs, P)
        totals = ()
        if not PLAIN:
            total = _total(parts + pair * P * SPLITS * 2, P, PP, SPLITS)
            totals = _each(_with_held(total, held + pair * P, P, PP, FLOOR), P, PP)
        key = _keys(peak, run < filled, totals, scale, P, PLAIN)
        least = -0x7FFFFFFF  # only keys that are not live are below
        top = tl.max(key) + 1  # cannot overflow: inf maps to 0x7F800000
        bottom = tl.min(tl.where(run < filled, key, 0x7FFFFFFF))
        want = tl.minimum(k, filled)
        low, high, more = _bounds(key, want, tl.maximum(tl.minimum(bottom, top), least), top)
        place = _places(key, want, low, high, more)
        tl.store(chosen + pair * k + place, run, mask=place >= 0)
        tl.debug_barrier()  # each thread reads what other threads wrote
        r = tl.arange(0, KP * RUN)
        found = r // RUN < want
        m = tl.load(chosen + pair * k + r // RUN, mask=found, other=0) * RUN + r % RUN
        tl.debug_barrier()  # all loads are issued before the first is used
        live = found & (m < count)
        position = tl.load(candidates + pair * width + m, mask=found, other=0)  # in bounds: the buffer holds whole runs
        key = _keys(_heads(scores + pair * P * width, m, found, width, P), live, totals, scale, P, PLAIN)
        want = tl.minimum(k, count)
        if FLOOR:
            reach = tl.sum((key >= bound).to(tl.int32))
            want = tl.where(tl.load(lengths + seq) > whole, tl.minimum(want, reach), want)
        low = tl.where(filled < k, least, tl.maximum(low - 16, least))
        low, high, more = _bounds(key, want, low, top + 16)
        place = _places(key, want, low, high, more)
        tl.store(rows + pair * k + place, position + first, mask=place >= 0)
        for p in tl.static_range(HEADS):
            gone = tl.full((KP * RUN,), float("-inf"), tl.float32)
            tl.store(own + (pair * HEADS + p) * width + m, gone, mask=place >= 0)
        rest = tl.arange(0, KP)
        tl.store(rows + pair * k + rest, tl.full((KP,), -1, tl.int32), mask=(rest >= want) & (rest < k))
        tl.store(counts + pair, want)


def launch(found: Estimates, candidates: Tensor, wanted: Tensor, k: int, first: int, scale: float, policy: Merge,
           floor: Floor | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch the kernels on any device.

    found: of the kernel of rerank. `topk` explains the others.
    """
    scores, peaks, run = found.scores, found.peaks, found.run
    batch, heads, scored, width = scores.shape
    runs, padded, follows = peaks.shape[3], triton.next_power_of_2(k), dependent(candidates.device)
    assert scores.is_contiguous() and candidates.is_contiguous() and found.parts.is_contiguous() and peaks.is_contiguous()
    assert width % TILE == 0, f"{width} candidates are no whole tiles of {TILE}"
    assert runs <= MOST and padded * run <= MOST, f"{runs} runs of {run} candidates are too many for {k} rows"
    plain = scored == 1 and floor is None
    held, lengths = (found.parts, wanted) if floor is None else (floor.held, floor.lengths)
    assert held.is_contiguous() and lengths.dtype == torch.int32 and lengths.stride(0) == 1
    if policy == "mean" and not plain:
        live = torch.arange(width, device=scores.device) < wanted[:batch, None, None, None]
        summed = merge(scores.masked_fill(~live, -torch.inf), scale, policy, None if floor is None else held)
        scores, peaks, scored, plain = summed[:, :, None], summed.unflatten(2, (runs, run)).amax(dim=3), 1, True
    chosen, rows = torch.empty((2, batch, heads, k), dtype=torch.int32, device=candidates.device).unbind()
    counts = torch.empty((batch, heads), dtype=torch.int32, device=candidates.device)
    bound, whole = (0, 0) if floor is None else (_ordered(floor.least), floor.whole)
    most = max(triton.next_power_of_2(runs), padded * run)
    _choose[(heads, batch)](
        scores, found.scores, peaks, found.parts, candidates, wanted, held, chosen, rows, counts, lengths, heads, width, runs,
        scale, k, first, bound, whole, P=scored, PP=triton.next_power_of_2(scored), SPLITS=found.parts.shape[3], RUN=run,
        RUNS=triton.next_power_of_2(runs), KP=padded, PLAIN=plain, FLOOR=floor is not None,
        HEADS=found.scores.shape[2], num_warps=min(16, max(4, most // PER_WARP)), **follows,
    )  # fmt: skip
    return rows, counts


def topk(found: Estimates | Tensor, candidates: Tensor, wanted: Tensor, k: int, first: int, scale: float, policy: Merge,
         floor: Floor | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Select the k heaviest of the first wanted[l] candidates: rows [L, H, k] int32, ascending, -1 padded, and counts [L, H]
    int32. Their scores become -inf, so that `found` keeps only what the others score.

    found: from a kernel, or scores [L, H, P, width] float32 alone.
    first: added to every position.
    floor: what is lighter is not selected.

    Raises ConfigError if k exceeds the width of the candidates.
    """
    width = candidates.shape[2]
    if k > width:
        raise ConfigError(f"{k} rows are to be selected from {width} candidates; take more candidates (beta) or fewer rows")
    if isinstance(found, Estimates) and run_length(width, k) == found.run:
        return launch(found, candidates, wanted, k, first, scale, policy, floor)
    estimates = found.scores if isinstance(found, Estimates) else found
    known = torch.arange(width, device=candidates.device) < wanted[: candidates.shape[0], None, None]
    scores = estimates.masked_fill(~known[:, :, None], -torch.inf)
    merged = merge(scores, scale, policy, None if floor is None else floor.held)
    candidates = candidates.masked_fill(~known, -1)
    keep = heaviest(merged, candidates, k, floor)
    estimates.masked_fill_(keep[:, :, None], -torch.inf)
    return positions(keep, candidates, k, first)
