"""From a query to the rows of the best units (pages or clusters), cut at a budget of rows.

After the scores (see unit_scores) two kernels, and nothing is sorted. One, a program for every 1024 units of a KV head, reads
their G scores and keeps the units that this chunk alone would give: at most `budget` rows and one unit more, found by bisecting
the 32 bits of the score that fills the budget, in registers. The other, a program a KV head, does the same among what is left
(32768 pages at 1M tokens, 1024 rows: 32 x 32 pages) and writes the rows. Bytes: 4 (G + 2) a unit, 24 a unit kept, 8 a row: 0.8 MB
a head at most there.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from kvthaw.errors import ConfigError
from kvthaw.kernels import HAS_TRITON, unit_scores

Policy = Literal["max", "mean", "mean_query"]
"""How the query heads of a group agree on units: the largest or the mean of their softmax weights, where a unit of n tokens
weighs n exp(score) in the denominator, or the score of their mean query."""


def check_policy(policy: str) -> None:
    """Raise ConfigError for a policy that does not exist."""
    if policy not in get_args(Policy):
        raise ConfigError(f"policy is {policy!r}; it must be one of {', '.join(get_args(Policy))}")


def definition(
    query: Tensor, digests: Tensor, stops: Tensor, order: Tensor | None, counts: Tensor,
    *, first: int, budget: int, scale: float, policy: Policy,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rows of the units with the best scores, whole units and the last one cut: [B, H, budget] int32, and how many, [B, H]
    int32.

    query [B, Hq, D]. digests [B, H, U, E]: a unit's centroid where E = D, score q.mu; or centre and half extent of the box
    around its keys where E = 2 D, score q.c + |q|.delta, the largest q.k in the box. counts [B] int32: units of a lane; the
    rest is undefined. stops [B, H, U + 1] int32: unit u is order[stops[u] : stops[u + 1]]; order [B, H, T] int32 holds
    positions, and None means that it would hold first, first + 1, ... What stands before stops[0] is static: always taken, up
    to the budget. Rows are the static ones, then the units' in the order of the units; -1 behind them. Of equal scores the
    earlier unit wins.
    """
    heads = stops.shape[1]
    all_scores = unit_scores.definition(query, digests, stops, counts, scale=scale, mean=policy == "mean_query")
    rows = torch.full((query.shape[0], heads, budget), -1, dtype=torch.int32)
    for b in range(query.shape[0]):
        for h in range(heads):
            bounds = stops[b, h, : int(counts[b]) + 1].tolist()
            sizes = torch.tensor(bounds).diff().float().to(query.device)
            scores = all_scores[b, h, :, : len(sizes)]
            if len(scores) > 1:
                scores = scores - torch.logsumexp(scores + sizes.log(), dim=1, keepdim=True).clamp(min=-3e38)
            merged = scores.amax(dim=0) if policy == "max" else torch.logsumexp(scores, dim=0)
            room = budget - min(bounds[0], budget)
            taken = [0] * len(sizes)
            for u in torch.sort(merged, descending=True, stable=True).indices.tolist():
                taken[u] = min(room, bounds[u + 1] - bounds[u])
                room -= taken[u]
            spans = [(0, min(bounds[0], budget)), *((bounds[u], bounds[u] + n) for u, n in enumerate(taken))]
            places = [i for span in spans for i in range(*span)]
            chosen = [first + i for i in places] if order is None else order[b, h, places].tolist()
            rows[b, h, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return rows.to(query.device), (rows >= 0).sum(dim=2, dtype=torch.int32).to(query.device)


def vectorised(
    query: Tensor, digests: Tensor, stops: Tensor, order: Tensor | None, counts: Tensor,
    *, first: int, budget: int, scale: float, policy: Policy,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `definition`, in torch operations over all units of the tables; no host sync on a GPU."""
    batch, heads, units = digests.shape[:3]
    known = torch.arange(units, device=query.device) < counts[:, None, None]
    sizes = torch.where(known, stops[:, :, 1:] - stops[:, :, :-1], 0)
    scores = unit_scores.definition(query, digests, stops, counts, scale=scale, mean=policy == "mean_query")
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
    place = torch.arange(budget, device=query.device).expand(batch, heads, -1)
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

    _CHUNK = tl.constexpr(1024)

    @triton.jit
    def _threshold(key, size, room):
        # The largest t such that units of key >= t fill the room, or the least integer; and the rows of the units of key > t.
        low, high, above = tl.full([], -0x80000000, tl.int64), tl.full([], 0x7FFFFFFF, tl.int64), tl.full([], 0, tl.int32)
        for _ in range(32):
            middle = low + (high - low) // 2
            found = tl.sum(tl.where(key >= middle.to(tl.int32), size, 0))
            low = tl.where(found >= room, middle, low)
            high = tl.where(found >= room, high, middle)
            above = tl.where(found >= room, above, found)
        return low.to(tl.int32), above

    @triton.jit
    def _narrow(
        scores, parts, stops, counts, keys, names, found, budget, heads, units, blocks, chunks,
        GS: tl.constexpr, GP: tl.constexpr, SCORED: tl.constexpr, PARTS: tl.constexpr, MEAN: tl.constexpr,
    ):  # fmt: skip
        # One program a (chunk of units; lane and head): the group's scores become one, as an integer of the same order, and of the
        # chunk's units those stay that would be taken if there were no other chunk. keys, names [B, H, chunks, _CHUNK] int32: their
        # keys and which they are, by unit; found [B, H, chunks]: how many.
        chunk, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
        count = tl.load(counts + bh // heads)
        kept = tl.full([], 0, tl.int32)
        if chunk * _CHUNK < count:
            group = tl.arange(0, GP)
            lse = tl.zeros([GP], tl.float32)
            if GS > 1:
                top, total = tl.full([GP], float("-inf"), tl.float32), tl.zeros([GP], tl.float32)
                filled = tl.cdiv(count, SCORED)
                for start in range(0, filled, PARTS):
                    p = start + tl.arange(0, PARTS)
                    part = parts + (bh * blocks + p[:, None]) * 2 * GP + group[None, :]
                    inside = (p < filled)[:, None] & (group < GS)[None, :]
                    high = tl.load(part, mask=inside, other=float("-inf"))
                    some = tl.load(part + GP, mask=inside, other=0.0)
                    new = tl.maximum(top, tl.max(high, axis=0))
                    safe = tl.where(new == float("-inf"), 0.0, new)
                    total = total * tl.exp(top - safe) + tl.sum(some * tl.exp(high - safe[None, :]), axis=0)
                    top = new
                lse = tl.where(total > 0.0, top + tl.log(tl.where(total > 0.0, total, 1.0)), 0.0)
            u = chunk * _CHUNK + tl.arange(0, _CHUNK)
            known = u < count
            merged = tl.full([_CHUNK], float("-inf"), tl.float32)
            for i in tl.static_range(GS):
                mine = tl.sum(tl.where(group == i, lse, 0.0))
                merged = tl.maximum(merged, tl.load(scores + (bh * GS + i) * units + u, mask=known, other=float("-inf")) - mine)
            if MEAN:
                safe = tl.where(merged == float("-inf"), 0.0, merged)
                weight = tl.zeros([_CHUNK], tl.float32)
                for i in tl.static_range(GS):
                    mine = tl.sum(tl.where(group == i, lse, 0.0))
                    weight += tl.exp(tl.load(scores + (bh * GS + i) * units + u, mask=known, other=float("-inf")) - mine - safe)
                merged = tl.where(merged == float("-inf"), merged, merged + tl.log(tl.maximum(weight, 1e-30)))
            stop = stops + bh * (units + 1) + u
            size = tl.load(stop + 1, mask=known, other=0) - tl.load(stop, mask=known, other=0)
            room = budget - tl.minimum(tl.load(stops + bh * (units + 1)), budget)
            bits = merged.to(tl.int32, bitcast=True)
            key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
            least, above = _threshold(key, size, room)
            tied = tl.where(key == least, size, 0)
            stays = (key > least) | (tl.cumsum(tied, axis=0) - tied < room - above) & (key == least)
            stays = stays & (size > 0)
            place = (bh * chunks + chunk) * _CHUNK + tl.cumsum(stays.to(tl.int32), axis=0) - 1
            tl.store(keys + place, key, mask=stays)
            tl.store(names + place, u, mask=stays)
            kept = tl.sum(stays.to(tl.int32))
        tl.store(found + bh * chunks + chunk, kept)

    @triton.jit
    def _choose(
        keys, names, found, stops, order, counts, scratch, rows, taken, first, budget, heads, units, chunks, capacity,
        BLOCK: tl.constexpr, CP: tl.constexpr, ROWS: tl.constexpr, CSTEPS: tl.constexpr, STEPS: tl.constexpr, MAPPED: tl.constexpr,
    ):  # fmt: skip
        # One program a (lane and head), over the chunks' units. scratch [B, H, 4, chunks * _CHUNK] int32: of the units side by side
        # their keys, which they are, their sizes and then how many rows those up to each give; and the chunks' prefix sums.
        bh = tl.program_id(0).to(tl.int64)
        wide = chunks * _CHUNK
        keys += bh * wide
        names += bh * wide
        stops += bh * (units + 1)
        key_of = scratch + bh * 4 * wide
        name_of, ends, upto = key_of + wide, key_of + 2 * wide, key_of + 3 * wide
        static = tl.minimum(tl.load(stops), budget)
        room = budget - static
        c, lane = tl.arange(0, CP), tl.arange(0, BLOCK)
        sizes = tl.load(found + bh * chunks + c, mask=c < chunks, other=0)
        total = tl.sum(sizes)
        tl.store(upto + c, tl.cumsum(sizes, axis=0), mask=c < chunks)
        tl.debug_barrier()
        for start in range(0, total, BLOCK):
            j = start + lane
            left, right = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32) + chunks
            for _ in range(CSTEPS):  # the first chunk that ends behind j
                middle = (left + right) // 2
                open_ = left < right
                past = open_ & (tl.load(upto + middle, mask=open_, other=0) <= j)
                right = tl.where(open_ & (~past), middle, right)
                left = tl.where(past, middle + 1, left)
            here = j < total
            source = left * _CHUNK + j - tl.load(upto + left - 1, mask=here & (left > 0), other=0)
            name = tl.load(names + source, mask=here, other=0)
            tl.store(key_of + j, tl.load(keys + source, mask=here, other=0), mask=here)
            tl.store(name_of + j, name, mask=here)
            tl.store(
                ends + j, tl.load(stops + name + 1, mask=here, other=0) - tl.load(stops + name, mask=here, other=0), mask=here
            )
        tl.debug_barrier()
        low, high, above = tl.full([], -0x80000000, tl.int64), tl.full([], 0x7FFFFFFF, tl.int64), tl.full([], 0, tl.int32)
        for _ in range(32):  # as in _threshold, over more units than one block holds
            middle = low + (high - low) // 2
            some = tl.zeros([BLOCK], tl.int32)
            for start in range(0, total, BLOCK):
                j = start + lane
                key = tl.load(key_of + j, mask=j < total, other=-0x80000000)
                some += tl.where(key >= middle.to(tl.int32), tl.load(ends + j, mask=j < total, other=0), 0)
            filled = tl.sum(some)
            low = tl.where(filled >= room, middle, low)
            high = tl.where(filled >= room, high, middle)
            above = tl.where(filled >= room, above, filled)
        out, same = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
        for start in range(0, total, BLOCK):
            j = start + lane
            key = tl.load(key_of + j, mask=j < total, other=-0x80000000)
            size = tl.load(ends + j, mask=j < total, other=0)
            tied = tl.where(key == low.to(tl.int32), size, 0)
            rest = room - above - same - (tl.cumsum(tied, axis=0) - tied)
            take = tl.where(key > low.to(tl.int32), size, tl.minimum(tl.maximum(rest, 0), tied))
            tl.store(ends + j, out + tl.cumsum(take, axis=0), mask=j < total)
            out += tl.sum(take)
            same += tl.sum(tied)
        tl.debug_barrier()
        for start in range(0, budget, ROWS):
            m = start + tl.arange(0, ROWS)
            w = m - static
            left, right = tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.int32) + total
            for _ in range(STEPS):  # the first unit that ends behind w
                middle = (left + right) // 2
                open_ = left < right
                past = open_ & (tl.load(ends + middle, mask=open_, other=0) <= w)
                right = tl.where(open_ & (~past), middle, right)
                left = tl.where(past, middle + 1, left)
            of_unit = (w >= 0) & (w < out)
            before = tl.load(ends + left - 1, mask=of_unit & (left > 0), other=0)
            begin = tl.load(stops + tl.load(name_of + left, mask=of_unit, other=0), mask=of_unit, other=0)
            source = tl.where(m < static, m, begin + w - before)
            wanted = m < static + out
            row = tl.load(order + bh * capacity + source, mask=wanted, other=-1) if MAPPED else source + first
            tl.store(rows + bh * budget + m, tl.where(wanted, row, -1), mask=m < budget)
        tl.store(taken + bh, static + out)


def launch(
    query: Tensor, digests: Tensor, stops: Tensor, order: Tensor | None, counts: Tensor,
    *, first: int, budget: int, scale: float, policy: Policy,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The Triton kernels; arguments and result as in `definition`. All tensors contiguous; static shapes, no host sync."""
    batch, heads, units = digests.shape[:3]
    assert order is None or (order.is_contiguous() and order.dtype == torch.int32), "order is not contiguous int32"
    scores, parts = unit_scores.launch(query, digests, stops, counts, scale=scale, mean=policy == "mean_query")
    blocks, padded, chunks = parts.shape[2], parts.shape[4], max(1, triton.cdiv(units, 1024))
    empty = partial(query.new_empty, dtype=torch.int32)
    scratch, found = empty((6, batch, heads, chunks * 1024)), empty((batch, heads, chunks))
    rows, taken = empty((batch, heads, budget)), empty((batch, heads))
    keys, names = scratch[0], scratch[1]
    _narrow[(chunks, batch * heads)](
        scores, parts, stops, counts, keys, names, found, budget, heads, units, blocks, chunks,
        GS=scores.shape[2], GP=padded, SCORED=unit_scores.BLOCK, PARTS=64, MEAN=policy == "mean", num_warps=4,
    )  # fmt: skip
    _choose[(batch * heads,)](
        keys, names, found, stops, stops if order is None else order, counts, scratch[2:], rows, taken, first, budget, heads, units,
        chunks, 0 if order is None else order.shape[2], BLOCK=1024, CP=triton.next_power_of_2(chunks), CSTEPS=chunks.bit_length(),
        ROWS=min(1024, max(32, triton.next_power_of_2(budget))), STEPS=units.bit_length(), MAPPED=order is not None, num_warps=8,
    )  # fmt: skip
    return rows, taken


def unit_select(
    query: Tensor, digests: Tensor, stops: Tensor, order: Tensor | None, counts: Tensor,
    *, first: int, budget: int, scale: float, policy: Policy,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `definition`: the kernels on a GPU, vectorised torch elsewhere."""
    if HAS_TRITON and query.device.type == "cuda":
        return launch(query, digests, stops, order, counts, first=first, budget=budget, scale=scale, policy=policy)
    return vectorised(query, digests, stops, order, counts, first=first, budget=budget, scale=scale, policy=policy)
