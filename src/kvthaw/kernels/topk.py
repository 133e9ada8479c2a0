"""The k best candidates of each KV head, by the weight their estimates give them.

The query heads of a group agree by the largest or the mean of their softmax weights over the candidates, in logs; a single
head's estimates rank as they are. Equal weights: the lowest position first.

Bytes and operations, 8 KV heads, 13k candidates, G = 4: 1.7 MB of estimates read once. A program takes 1024 candidates, finds
the bits of the k-th largest eight at a time by four histograms, and leaves its k best; further launches do the same with what
is left (1300 of 13k; 10300, then 1100 of 105k), and the last writes the rows. 470 instructions a candidate: 2 us for 13k of 8
heads, 13 us for 105k. A sort would touch each candidate 17 times.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvthaw.errors import ConfigError
from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.bucket_topk import compact
from kvthaw.kernels.rerank import TILE, Estimates

Merge = Literal["max", "mean"]
MOST = 8192
"""The largest k that the kernel serves; beyond it torch sorts."""


def merge(scores: Tensor, scale: float, policy: Merge) -> Tensor:
    """[L, H, P, width] estimates of q.k -> [L, H, width]: log of the largest or the summed softmax weight; -inf stays."""
    if scores.shape[2] == 1:
        return scores[:, :, 0]
    logits = scores * scale
    total = torch.logsumexp(logits, dim=3, keepdim=True)
    weight = logits - torch.where(total == -torch.inf, 0.0, total)
    return weight.amax(dim=2) if policy == "max" else torch.logsumexp(weight, dim=2)


def definition(merged: Tensor, candidates: Tensor, k: int, first: int) -> tuple[Tensor, Tensor]:
    """The k largest of merged [L, H, width] as rows [L, H, k] int32, ascending positions + first, -1 padded, and counts [L, H].

    candidates [L, H, width] int32 are ascending positions, -1 padded; merged is -inf there.
    """
    order = torch.sort(merged, dim=2, descending=True, stable=True).indices[:, :, :k]
    keep = torch.zeros_like(candidates, dtype=torch.bool).scatter_(2, order, True) & (candidates >= 0)
    at = compact(keep, k)
    rows = torch.where(at >= 0, candidates.gather(2, at.clamp(min=0).long()) + first, -1)
    return rows.int(), keep.sum(dim=2).int()


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _best(key, live, k):
        # Which of the live keys (uint32) are among the k largest, the first of equal ones preferred.
        remaining = tl.minimum(k, tl.sum(live.to(tl.int32)))
        digits = tl.arange(0, 256)
        prefix = tl.zeros((1,), tl.uint32)
        candidate = live
        for step in tl.static_range(4):
            digit = ((key >> (24 - 8 * step)) & 255).to(tl.int32)
            above = tl.cumsum(tl.histogram(digit, 256, mask=candidate), axis=0, reverse=True)
            found = tl.sum((above >= remaining).to(tl.int32)) - 1
            remaining -= tl.sum(tl.where(digits == found + 1, above, 0))
            prefix = (prefix << 8) | found.to(tl.uint32)
            candidate = candidate & (digit == found)
        tie = candidate.to(tl.int32)
        rank = tl.cumsum(tie, axis=0) - tie
        return (live & (key > prefix)) | (candidate & (rank < remaining))

    @triton.jit
    def _emit(take, key, place, keys, places, counts, slot, pair, k, first, KP: tl.constexpr, FINAL: tl.constexpr):
        one = take.to(tl.int32)
        at = slot + tl.cumsum(one, axis=0) - one
        taken = tl.sum(one)
        rest = tl.arange(0, KP)
        spare = (rest >= taken) & (rest < k)
        if FINAL:
            tl.store(places + at, place + first, mask=take)
            tl.store(places + slot + rest, tl.full((KP,), -1, tl.int32), mask=spare)
            tl.store(counts + pair, taken)
        else:
            tl.store(places + at, place, mask=take)
            tl.store(keys + at, key.to(tl.int32, bitcast=True), mask=take)
            tl.store(keys + slot + rest, tl.zeros((KP,), tl.int32), mask=spare)

    @triton.jit
    def _first_round(scores, parts, candidates, wanted, keys, places, counts, heads, width, tiles, scale, k, first,
                     P: tl.constexpr, MEAN: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
                     KP: tl.constexpr, FINAL: tl.constexpr):  # fmt: skip
        # One program: CHUNK candidates of one KV head; their group's weights become one number, and k of them stay.
        chunk = tl.program_id(0)
        lane = tl.program_id(2)
        pair = (lane * heads + tl.program_id(1)).to(tl.int64)
        count = tl.load(wanted + lane)
        m = chunk * CHUNK + tl.arange(0, CHUNK)
        live = m < count
        place = tl.load(candidates + pair * width + m, mask=live, other=0)
        merged = tl.full((CHUNK,), float("-inf"), tl.float32)
        if P == 1:
            merged = tl.load(scores + pair * width + m, mask=live, other=float("-inf"))
        else:
            t = tl.arange(0, TILES)
            for p in tl.static_range(P):
                part = parts + ((pair * P + p) * tiles + t) * 2
                some = t * TILE < count
                tops = tl.load(part, mask=some, other=float("-inf"))
                top = tl.maximum(tl.max(tops, axis=0), -3.0e38)  # finite where there is no candidate at all
                mass = tl.sum(tl.load(part + 1, mask=some, other=0.0) * tl.exp(tops - top), axis=0)
                total = top + tl.log(tl.maximum(mass, 1.0e-30))
                score = tl.load(scores + (pair * P + p) * width + m, mask=live, other=float("-inf"))
                weight = score * scale - total
                if MEAN:
                    high = tl.maximum(merged, weight)
                    safe = tl.where(high == float("-inf"), 0.0, high)
                    merged = high + tl.log(tl.maximum(tl.exp(merged - safe) + tl.exp(weight - safe), 1.0e-30))
                else:
                    merged = tl.maximum(merged, weight)
        bits = (merged + 0.0).to(tl.uint32, bitcast=True)
        key = tl.where((bits >> 31) > 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)  # unsigned, in the order of the floats; never 0
        take = _best(key, live, k)
        slot = (pair * tl.num_programs(0) + chunk) * k
        _emit(take, key, place, keys, places, counts, slot, pair, k, first, KP, FINAL)

    @triton.jit
    def _next_round(keys_in, places_in, keys, places, counts, heads, slots, k, first, CHUNK: tl.constexpr, KP: tl.constexpr,
                    FINAL: tl.constexpr):  # fmt: skip
        chunk = tl.program_id(0)
        pair = (tl.program_id(2) * heads + tl.program_id(1)).to(tl.int64)
        s = chunk * CHUNK + tl.arange(0, CHUNK)
        key = tl.load(keys_in + pair * slots + s, mask=s < slots, other=0).to(tl.uint32, bitcast=True)
        live = key != 0
        place = tl.load(places_in + pair * slots + s, mask=s < slots, other=0)
        take = _best(key, live, k)
        slot = (pair * tl.num_programs(0) + chunk) * k
        _emit(take, key, place, keys, places, counts, slot, pair, k, first, KP, FINAL)


def launch(found: Estimates, candidates: Tensor, wanted: Tensor, k: int, first: int, scale: float, policy: Merge,
           chunk: int | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The kernels, on whatever device candidates are. chunk: candidates a program, a power of two above k."""
    assert found.parts is not None and k <= MOST
    lanes, heads, scored, width = found.scores.shape
    assert found.scores.is_contiguous() and candidates.is_contiguous() and found.parts.is_contiguous()
    block = chunk or max(1024, triton.next_power_of_2(4 * k))
    assert block >= 2 * k, "each round must at least halve what is left"
    counts = torch.empty((lanes, heads), dtype=torch.int32, device=candidates.device)
    slots, tiles = width, found.parts.shape[3]
    keys = places = candidates
    while True:
        start = keys is candidates
        final = slots <= 2 * block
        chunks = 1 if final else triton.cdiv(slots, block)
        size = triton.next_power_of_2(slots) if final else block
        shared = {"KP": triton.next_power_of_2(k), "FINAL": final, "num_warps": min(16, max(4, size // 256))}
        new_keys, new_places = torch.empty((2, lanes, heads, chunks * k), dtype=counts.dtype, device=counts.device).unbind()
        if start:
            _first_round[(chunks, heads, lanes)](
                found.scores, found.parts, candidates, wanted, new_keys, new_places, counts, heads, width, tiles, scale, k,
                first, P=scored, MEAN=policy == "mean", CHUNK=size, TILE=TILE, TILES=triton.next_power_of_2(tiles), **shared,
            )  # fmt: skip
        else:
            _next_round[(chunks, heads, lanes)](
                keys, places, new_keys, new_places, counts, heads, slots, k, first, CHUNK=size, **shared
            )  # fmt: skip
        if final:
            return new_places, counts
        keys, places, slots = new_keys, new_places, chunks * k


def topk(found: Estimates, candidates: Tensor, wanted: Tensor, k: int, first: int, scale: float,
         policy: Merge) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rows [L, H, k] int32, ascending, -1 padded, and counts [L, H] int32: of the first wanted[l] candidates the k that weigh
    most.

    first is added to every position. Raises ConfigError where k exceeds the width of the candidates.
    """
    width = candidates.shape[2]
    if k > width:
        raise ConfigError(f"{k} rows are to be selected from {width} candidates; take more candidates (beta) or fewer rows")
    if found.parts is not None and k <= MOST:
        return launch(found, candidates, wanted, k, first, scale, policy)
    known = torch.arange(width, device=candidates.device) < wanted[: candidates.shape[0], None, None]
    scores = found.scores.masked_fill(~known[:, :, None], -torch.inf)
    return definition(merge(scores, scale, policy), candidates.masked_fill(~known, -1), k, first)
