"""Select the rows of the best units (pages or clusters) for a query, up to a budget of rows.

A kernel follows the scores (see unit_scores), of one program per KV head; nothing is sorted. It reads the G scores of each
unit, finds in registers, by bisecting, the score that fills the budget, and writes the rows. With more than ALONE units
another kernel comes before it, of one program per 1024 units of a KV head. It keeps the units that its chunk alone would
select, at most `budget` rows and one more unit. For example, of 32768 pages at 1M tokens it keeps 32 x 32 pages for 1024
rows. The last kernel chooses among the kept units, in registers too unless a chunk kept more than its share. Bytes: 4 (G +
2) per unit, 24 per unit kept, 8 per row: 0.8 MB per head at most in this example.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON, unit_scores
from kvthaw.kernels.chain import dependent
from kvthaw.kernels.cut import row_stride
from kvthaw.kernels.gpu import by_device
from kvthaw.kernels.unit_scores import RecentQueries

ALONE = 4096
"""Units among which one program chooses for a head."""

Policy = Literal["max", "mean", "mean_query"]
"""How the query heads of a group rank units: by the maximum or the mean of their softmax weights, or by the score of their
mean query. A unit of n tokens contributes n exp(score) to the denominator of the softmax."""


def definition(
    query: Tensor, digests: Tensor, stops: Tensor, order: Tensor | None, counts: Tensor,
    *, first: int, budget: int, scale: float, policy: Policy, recent: RecentQueries | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Select the rows of the units with the best scores, [B, H, budget] int32, and their number, [B, H] int32.

    query: [B, Hq, D].
    digests: [B, H, U, E]. If E = D: a unit's centroid, with score q.mu. If E = 2 D: the centre and half extent of the box
        around its keys, with score q.c + |q|.delta, the maximum of q.k over the box.
    counts: [B] int32, units of a sequence; later entries are undefined.
    stops: [B, H, U + 1] int32; unit u is order[stops[u] : stops[u + 1]].
    order: [B, H, T] int32, positions; None means first, first + 1, ...

    Tokens before stops[0] are static: always selected, up to the budget. Units are selected whole, except that the last one
    is cut. The result lists the static rows, then the rows of the units in unit order, then -1. Ties go to the earlier
    unit.

    recent: the query is stored there and the step counted; None: nothing is stored. Torch operations over all units; no
        host sync on a GPU.
    """
    if recent is not None:
        recent.record(query)
    scores = unit_scores.definition(query, digests, stops, counts, scale=scale, mean=policy == "mean_query")
    return choose(scores, stops, order, counts, first=first, budget=budget, policy=policy)


def choose(
    scores: Tensor, stops: Tensor, order: Tensor | None, counts: Tensor, *, first: int, budget: int, policy: Policy
) -> tuple[Tensor, Tensor]:
    """Select as `definition` does, from scores [B, H, G, U] float32, -inf for missing or empty units."""
    batch, heads, _, units = scores.shape
    known = torch.arange(units, device=scores.device) < counts[:, None, None]
    sizes = torch.where(known, stops[:, :, 1:] - stops[:, :, :-1], 0)
    if scores.shape[2] > 1:
        lse = torch.logsumexp(scores + sizes.log()[:, :, None], dim=3, keepdim=True)
        scores = scores - torch.where(lse == -torch.inf, 0.0, lse)
    merged = scores.amax(dim=2) if policy == "max" else torch.logsumexp(scores, dim=2)
    static = stops[:, :, :1].clamp(max=budget)
    best = torch.sort(merged, dim=2, descending=True, stable=True).indices
    size = sizes.gather(2, best)
    before = torch.cumsum(size, dim=2) - size
    taken = torch.zeros_like(before).scatter_(2, best, torch.minimum((budget - static - before).clamp(min=0), size.long()))
    ends = torch.cumsum(taken, dim=2)
    total = static[:, :, 0] + taken.sum(dim=2)
    place = torch.arange(budget, device=scores.device).expand(batch, heads, -1)
    unit = torch.searchsorted(ends, place - static, right=True).clamp(max=max(0, units - 1))
    if units:
        within = place - static - (ends - taken).gather(2, unit)
        source = torch.where(place < static, place, stops.gather(2, unit) + within)
    else:
        source = place
    wanted = place < total[..., None]
    source = torch.where(wanted, source, 0)
    rows = source + first if order is None or order.shape[2] == 0 else order.gather(2, source)
    return torch.where(wanted, rows, -1).int(), total.int()


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.chain import follow

    _CHUNK = tl.constexpr(1024)
    _ROUNDS = tl.constexpr(6)  # before it is counted what is between, which takes as long as one

    @triton.jit
    def _cut(key, size, least, room):
        # Return the rows to take from each unit: all of units with a key above `least`, then of those with that key, earlier
        # ones first, until `room` rows are taken; and the number of rows with that key.
        tied = tl.where(key == least, size, 0)
        rest = room - (tl.cumsum(tied, axis=0) - tied)
        return tl.where(key > least, size, tl.minimum(tl.maximum(rest, 0), tied)), tl.sum(tied)

    @triton.jit
    def _taken(key, size, room):
        # Return the rows of each unit that fill the room. The units with keys at or above `low` fill it, those at or above `high`
        # do not; above: the rows of the latter. Bisects until one unit is between, or several with the same key.
        there = size > 0
        high = tl.minimum(tl.max(tl.where(there, key, -0x80000000)), 0x7FFFFFFE).to(tl.int64) + 1
        low = tl.min(tl.where(there, key, 0x7FFFFFFF)).to(tl.int64)
        all_fit = tl.sum(size) <= room
        low = tl.where(room > 0, tl.where(all_fit, -0x80000000, low), high)
        above, between = tl.full([], 0, tl.int32), tl.where(all_fit, 0, 2)
        while (between > 1) & (high - low > 1):
            for _ in range(_ROUNDS):
                middle = low + (high - low) // 2
                found = tl.sum(tl.where(key >= middle.to(tl.int32), size, 0))
                low = tl.where(found >= room, middle, low)
                high = tl.where(found >= room, high, middle)
                above = tl.where(found >= room, above, found)
            inside = there & (key >= low.to(tl.int32)) & (key < high.to(tl.int32))
            between = tl.sum(inside.to(tl.int32))
        least = tl.max(tl.where(there & (key < high.to(tl.int32)), key, -0x80000000))
        least = tl.where(all_fit | (room <= 0), low.to(tl.int32), least)
        take, _ = _cut(key, size, least, room - above)
        return take

    @triton.jit
    def _merged(
        scores, parts, stops, count, bh, u, units, blocks, stop_row,
        GS: tl.constexpr, GC: tl.constexpr, SCORED: tl.constexpr, PARTS: tl.constexpr, MEAN: tl.constexpr,
    ):  # fmt: skip
        # Merge the group's scores of units u into one integer key of the same order. Returns key, first token and size of each.
        group = tl.arange(0, GC)
        lse = tl.zeros([GC], tl.float32)
        if GS > 1:
            top, total = tl.full([GC], float("-inf"), tl.float32), tl.zeros([GC], tl.float32)
            filled = tl.cdiv(count, SCORED)
            for start in range(0, filled, PARTS):
                p = start + tl.arange(0, PARTS)
                part = parts + (bh * blocks + p[:, None]) * 2 * GC + group[None, :]
                inside = (p < filled)[:, None] & (group < GS)[None, :]
                high = tl.load(part, mask=inside, other=float("-inf"))
                some = tl.load(part + GC, mask=inside, other=0.0)
                new = tl.maximum(top, tl.max(high, axis=0))
                safe = tl.where(new == float("-inf"), 0.0, new)
                total = total * tl.exp(top - safe) + tl.sum(some * tl.exp(high - safe[None, :]), axis=0)
                top = new
            lse = tl.where(total > 0.0, top + tl.log(tl.where(total > 0.0, total, 1.0)), 0.0)
        known = u < count
        merged = tl.full(u.shape, float("-inf"), tl.float32)
        for i in tl.static_range(GS):
            mine = tl.sum(tl.where(group == i, lse, 0.0))
            merged = tl.maximum(merged, tl.load(scores + (bh * GS + i) * units + u, mask=known, other=float("-inf")) - mine)
        if MEAN:
            safe = tl.where(merged == float("-inf"), 0.0, merged)
            weight = tl.zeros(u.shape, tl.float32)
            for i in tl.static_range(GS):
                mine = tl.sum(tl.where(group == i, lse, 0.0))
                weight += tl.exp(tl.load(scores + (bh * GS + i) * units + u, mask=known, other=float("-inf")) - mine - safe)
            merged = tl.where(merged == float("-inf"), merged, merged + tl.log(tl.maximum(weight, 1e-30)))
        stop = stops + bh * stop_row + u
        begin = tl.load(stop, mask=known, other=0)
        size = tl.load(stop + 1, mask=known, other=0) - begin
        bits = merged.to(tl.int32, bitcast=True)
        return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), begin, size

    @triton.jit
    def _narrow(
        scores, parts, stops, counts, keys, begins, sizes, found, budget, heads, units, blocks, chunks, stop_row,
        GS: tl.constexpr, GC: tl.constexpr, SCORED: tl.constexpr, PARTS: tl.constexpr, MEAN: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        # Program (chunk of units; sequence and head). Keeps the units that would be selected if the chunk were alone. keys, begins,
        # sizes [B, H, chunks, _CHUNK] int32: key, first token and size of each kept unit; found [B, H, chunks]: their number.
        chunk, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
        count = tl.minimum(tl.load(counts + bh // heads), units)
        kept = tl.full([], 0, tl.int32)
        room = budget - tl.minimum(tl.load(stops + bh * stop_row), budget)
        follow(PDL)
        if chunk * _CHUNK < count:
            u = chunk * _CHUNK + tl.arange(0, _CHUNK)
            key, begin, size = _merged(scores, parts, stops, count, bh, u, units, blocks, stop_row, GS, GC, SCORED, PARTS, MEAN)
            stays = (_taken(key, size, room) > 0) & (size > 0)
            place = (bh * chunks + chunk) * _CHUNK + tl.cumsum(stays.to(tl.int32), axis=0) - 1
            tl.store(keys + place, key, mask=stays)
            tl.store(begins + place, begin, mask=stays)
            tl.store(sizes + place, size, mask=stays)
            kept = tl.sum(stays.to(tl.int32))
        tl.store(found + bh * chunks + chunk, kept)

    @triton.jit
    def _choose(
        scores, parts, counts, keys, begins, sizes, found, stops, order, side, ends, rows, taken, steps, first, budget, heads,
        units, blocks, chunks, stop_row, capacity, GS: tl.constexpr, GC: tl.constexpr, SCORED: tl.constexpr, PARTS: tl.constexpr,
        MEAN: tl.constexpr, ALONE: tl.constexpr, BLOCK: tl.constexpr, CP: tl.constexpr, EACH: tl.constexpr, ROWS: tl.constexpr,
        CSTEPS: tl.constexpr, MAPPED: tl.constexpr, COUNT_STEP: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        # Program (sequence and head), over the units that the chunks kept; ALONE: over all of them, CP * EACH at most. ends [B, H,
        # 2, budget] int32: for each unit taken, its first token and the number of rows up to its end. side [B, H, 4, chunks *
        # _CHUNK]: if a chunk has more than EACH units, the keys, begins and sizes of all units, compacted, and the prefix sums of
        # the chunks.
        bh = tl.program_id(0).to(tl.int64)
        wide = chunks * _CHUNK
        keys += bh * wide
        begins += bh * wide
        sizes += bh * wide
        begin_of = ends + bh * 2 * budget
        ends = begin_of + budget
        static = tl.minimum(tl.load(stops + bh * stop_row), budget)
        room = budget - static
        count = tl.minimum(tl.load(counts + bh // heads), units)
        follow(PDL)
        c = tl.arange(0, CP)
        kept = tl.load(found + bh * chunks + c, mask=c < (0 if ALONE else chunks), other=0)
        out, many = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
        if tl.max(kept) <= EACH:
            j = tl.arange(0, CP * EACH)
            if ALONE:
                key, begin, size = _merged(
                    scores, parts, stops, count, bh, j, units, blocks, stop_row, GS, GC, SCORED, PARTS, MEAN
                )
            else:
                chunk, i = j // EACH, j % EACH
                here = i < tl.load(found + bh * chunks + chunk, mask=chunk < chunks, other=0)
                source = chunk * _CHUNK + i
                key = tl.load(keys + source, mask=here, other=-0x80000000)
                size = tl.load(sizes + source, mask=here, other=0)
                begin = tl.load(begins + source, mask=here, other=0)
            take = _taken(key, size, room)
            chosen = take > 0
            place = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
            tl.store(begin_of + place, begin, mask=chosen)
            tl.store(ends + place, tl.cumsum(take, axis=0), mask=chosen)
            out, many = tl.sum(take), tl.sum(chosen.to(tl.int32))
        else:
            key_of = side + bh * 4 * wide
            from_of, size_of, upto = key_of + wide, key_of + 2 * wide, key_of + 3 * wide
            offset, total = tl.arange(0, BLOCK), tl.sum(kept)
            tl.store(upto + c, tl.cumsum(kept, axis=0), mask=c < chunks)
            tl.debug_barrier()
            for start in range(0, total, BLOCK):
                j = start + offset
                left, right = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32) + chunks
                for _ in range(CSTEPS):  # binary search for the first chunk that ends after j
                    middle = (left + right) // 2
                    open_ = left < right
                    past = open_ & (tl.load(upto + middle, mask=open_, other=0) <= j)
                    right = tl.where(open_ & (~past), middle, right)
                    left = tl.where(past, middle + 1, left)
                here = j < total
                source = left * _CHUNK + j - tl.load(upto + left - 1, mask=here & (left > 0), other=0)
                tl.store(key_of + j, tl.load(keys + source, mask=here, other=0), mask=here)
                tl.store(from_of + j, tl.load(begins + source, mask=here, other=0), mask=here)
                tl.store(size_of + j, tl.load(sizes + source, mask=here, other=0), mask=here)
            tl.debug_barrier()
            low, high, above = tl.full([], -0x80000000, tl.int64), tl.full([], 0x7FFFFFFF, tl.int64), tl.full([], 0, tl.int32)
            for _ in range(32):  # as in _taken, for more units than one block holds
                middle = low + (high - low) // 2
                some = tl.zeros([BLOCK], tl.int32)
                for start in range(0, total, BLOCK):
                    j = start + offset
                    key = tl.load(key_of + j, mask=j < total, other=-0x80000000)
                    some += tl.where(key >= middle.to(tl.int32), tl.load(size_of + j, mask=j < total, other=0), 0)
                filled = tl.sum(some)
                low = tl.where(filled >= room, middle, low)
                high = tl.where(filled >= room, high, middle)
                above = tl.where(filled >= room, above, filled)
            same = tl.full([], 0, tl.int32)
            for start in range(0, total, BLOCK):
                j = start + offset
                key = tl.load(key_of + j, mask=j < total, other=-0x80000000)
                size = tl.load(size_of + j, mask=j < total, other=0)
                take, tied = _cut(key, size, low.to(tl.int32), room - above - same)
                chosen = take > 0
                place = many + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
                tl.store(begin_of + place, tl.load(from_of + j, mask=chosen, other=0), mask=chosen)
                tl.store(ends + place, out + tl.cumsum(take, axis=0), mask=chosen)
                out += tl.sum(take)
                same += tied
                many += tl.sum(chosen.to(tl.int32))
        tl.debug_barrier()
        for start in range(0, budget, ROWS):
            m = start + tl.arange(0, ROWS)
            w = m - static
            left, right, open_ = tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.int32) + many, many
            while open_ > 0:  # binary search for the first unit taken that ends after w
                middle = (left + right) // 2
                inside = left < right
                past = inside & (tl.load(ends + middle, mask=inside, other=0) <= w)
                right = tl.where(inside & (~past), middle, right)
                left = tl.where(past, middle + 1, left)
                open_ = open_ // 2
            of_unit = (w >= 0) & (w < out)
            before = tl.load(ends + left - 1, mask=of_unit & (left > 0), other=0)
            begin = tl.load(begin_of + left, mask=of_unit, other=0)
            source = tl.where(m < static, m, begin + w - before)
            wanted = m < static + out
            row = tl.load(order + bh * capacity + source, mask=wanted, other=-1) if MAPPED else source + first
            tl.store(rows + bh * budget + m, tl.where(wanted, row, -1), mask=m < budget)
        tl.store(taken + bh, static + out)
        if COUNT_STEP:  # noqa: SIM102
            if bh == 0:
                tl.store(steps, tl.load(steps) + 1)


def launch(
    query: Tensor, digests: Tensor, stops: Tensor, order: Tensor | None, counts: Tensor,
    *, first: int, budget: int, scale: float, policy: Policy, recent: RecentQueries | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch the Triton kernels; arguments and result as in `definition`. Tables contiguous or cut to their first units; static
    shapes, no host sync."""
    scores, parts = unit_scores.launch(query, digests, stops, counts, scale=scale, mean=policy == "mean_query", recent=recent)
    steps = None if recent is None else recent.steps
    return launch_choice(scores, parts, stops, order, counts, first=first, budget=budget, policy=policy, steps=steps)


def launch_choice(
    scores: Tensor, parts: Tensor, stops: Tensor, order: Tensor | None, counts: Tensor,
    *, first: int, budget: int, policy: Policy, steps: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Select as `launch` does, from scores and parts as unit_scores.launch returns them. steps [1] int64 is incremented."""
    batch, heads, _, units = scores.shape
    assert order is None or (order.is_contiguous() and order.dtype == torch.int32), "order is not contiguous int32"
    blocks, compact, chunks, follows = (
        parts.shape[2],
        parts.shape[4],
        max(1, triton.cdiv(units, 1024)),
        dependent(scores.device),
    )
    sizes = heads, units, blocks, chunks, row_stride(stops)
    empty = partial(scores.new_empty, dtype=torch.int32)
    alone = units <= ALONE
    scratch, found = empty((7, batch, heads, 0 if alone else chunks * 1024)), empty((batch, heads, chunks))
    rows, taken, ends = empty((batch, heads, budget)), empty((batch, heads)), empty((batch, heads, 2, budget))
    how: dict[str, Any] = {"GS": scores.shape[2], "GC": compact, "SCORED": unit_scores.BLOCK, "PARTS": max(64, 1024 // compact)}
    how |= {"MEAN": policy == "mean", **follows}
    if not alone:
        _narrow[(chunks, batch * heads)](scores, parts, stops, counts, *scratch[:3], found, budget, *sizes, **how, num_warps=4)
    padded = triton.next_power_of_2(chunks)
    each = 1024 if alone else max(1, min(1024, max(64, 2048 // padded), 8192 // padded))
    _choose[(batch * heads,)](
        scores, parts, counts, *scratch[:3], found, stops, stops if order is None else order, scratch[3:], ends, rows, taken,
        counts if steps is None else steps, first, budget, *sizes, 0 if order is None else order.shape[2],
        ALONE=alone, BLOCK=1024, CP=padded, EACH=each, CSTEPS=chunks.bit_length(),
        ROWS=min(1024, max(32, triton.next_power_of_2(budget))), MAPPED=order is not None, COUNT_STEP=steps is not None,
        **how, num_warps=8 if padded * each <= 2048 else 16,
    )  # fmt: skip
    return rows, taken


unit_select = by_device(launch, definition)
