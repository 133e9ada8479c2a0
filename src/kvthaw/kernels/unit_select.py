"""From a query to the rows of the best units (pages or clusters), cut at a budget of rows.

After the scores (see unit_scores) one kernel, a program a lane and KV head: it reads G U float32 scores (1638 clusters at
128k tokens and G = 4: 26 kB; 32768 pages at 1M: 0.5 MB), finds the score of the last unit taken by bisection over its 32
bits, in 32 passes over U integers that stay in the nearest cache, and writes `budget` rows. Nothing is sorted.
"""

from __future__ import annotations

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
    query: Tensor,
    digests: Tensor,
    stops: Tensor,
    order: Tensor | None,
    counts: Tensor,
    *,
    first: int,
    budget: int,
    scale: float,
    policy: Policy,
) -> tuple[Tensor, Tensor]:
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
    query: Tensor,
    digests: Tensor,
    stops: Tensor,
    order: Tensor | None,
    counts: Tensor,
    *,
    first: int,
    budget: int,
    scale: float,
    policy: Policy,
) -> tuple[Tensor, Tensor]:
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

    @triton.jit
    def _choose(
        scores, parts, stops, order, counts, keys, ends, rows, taken, first, budget, heads, units, blocks, capacity,
        GS: tl.constexpr, GP: tl.constexpr, BLOCK: tl.constexpr, SCORED: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
        STEPS: tl.constexpr, MAPPED: tl.constexpr, MEAN: tl.constexpr,
    ):  # fmt: skip
        # One program a (lane and head). keys, ends [B, H, U] int32 are scratch: a score as an ordered integer; how many rows
        # the units up to this one give.
        bh = tl.program_id(0).to(tl.int64)
        count = tl.load(counts + bh // heads)
        stops += bh * (units + 1)
        keys += bh * units
        ends += bh * units
        static = tl.minimum(tl.load(stops), budget)
        room = budget - static
        unit, group = tl.arange(0, BLOCK), tl.arange(0, GP)
        lse = tl.zeros([GP], tl.float32)
        if GS > 1:
            top, total = tl.full([GP], float("-inf"), tl.float32), tl.zeros([GP], tl.float32)
            filled = tl.cdiv(count, SCORED)
            for start in range(0, filled, PARTS):
                p = start + tl.arange(0, PARTS)
                part = parts + (bh * blocks + p[:, None]) * 2 * GP + group[None, :]
                high = tl.load(part, mask=(p < filled)[:, None], other=float("-inf"))
                some = tl.load(part + GP, mask=(p < filled)[:, None], other=0.0)
                new = tl.maximum(top, tl.max(high, axis=0))
                safe = tl.where(new == float("-inf"), 0.0, new)
                total = total * tl.exp(top - safe) + tl.sum(some * tl.exp(high - safe[None, :]), axis=0)
                top = new
            lse = tl.where(total > 0.0, top + tl.log(tl.where(total > 0.0, total, 1.0)), 0.0)
        for start in range(0, count, BLOCK):  # merge the group; scores become integers of the same order
            u = start + unit
            known = u < count
            merged = tl.full([BLOCK], float("-inf"), tl.float32)
            for i in tl.static_range(GS):
                mine = tl.sum(tl.where(group == i, lse, 0.0))
                merged = tl.maximum(merged, tl.load(scores + (bh * GS + i) * units + u, mask=known, other=float("-inf")) - mine)
            if MEAN:
                safe = tl.where(merged == float("-inf"), 0.0, merged)
                weight = tl.zeros([BLOCK], tl.float32)
                for i in tl.static_range(GS):
                    mine = tl.sum(tl.where(group == i, lse, 0.0))
                    found = tl.load(scores + (bh * GS + i) * units + u, mask=known, other=float("-inf")) - mine
                    weight += tl.exp(found - safe)
                merged = tl.where(merged == float("-inf"), merged, merged + tl.log(tl.maximum(weight, 1e-30)))
            size = tl.load(stops + u + 1, mask=known, other=0) - tl.load(stops + u, mask=known, other=0)
            bits = merged.to(tl.int32, bitcast=True)
            key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
            tl.store(keys + u, tl.where(size > 0, key, -0x80000000), mask=known)
            tl.store(ends + u, size, mask=known)
        tl.debug_barrier()
        # The largest key t such that the units of key >= t fill the room; `above` rows come from the keys > t.
        low, high, above = tl.full([], -0x80000000, tl.int64), tl.full([], 0x7FFFFFFF, tl.int64), tl.full([], 0, tl.int32)
        for _ in range(32):
            middle = low + (high - low) // 2
            some = tl.zeros([BLOCK], tl.int32)
            for start in range(0, count, BLOCK):
                u = start + unit
                key = tl.load(keys + u, mask=u < count, other=-0x80000000)
                some += tl.where(key >= middle.to(tl.int32), tl.load(ends + u, mask=u < count, other=0), 0)
            found = tl.sum(some)
            enough = found >= room
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
            above = tl.where(enough, above, found)
        out, same = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
        for start in range(0, count, BLOCK):
            u = start + unit
            key = tl.load(keys + u, mask=u < count, other=-0x80000000)
            size = tl.load(ends + u, mask=u < count, other=0)
            tied = tl.where(key == low.to(tl.int32), size, 0)
            rest = room - above - same - (tl.cumsum(tied, axis=0) - tied)
            take = tl.where(key > low.to(tl.int32), size, tl.minimum(tl.maximum(rest, 0), tied))
            tl.store(ends + u, out + tl.cumsum(take, axis=0), mask=u < count)
            out += tl.sum(take)
            same += tl.sum(tied)
        tl.debug_barrier()
        for start in range(0, budget, ROWS):
            m = start + tl.arange(0, ROWS)
            w = m - static
            left, right = tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.int32) + count
            for _ in range(STEPS):  # the first unit that ends behind w
                middle = (left + right) // 2
                open_ = left < right
                past = open_ & (tl.load(ends + middle, mask=open_, other=0) <= w)
                right = tl.where(open_ & (~past), middle, right)
                left = tl.where(past, middle + 1, left)
            of_unit = (w >= 0) & (w < out)
            before = tl.load(ends + left - 1, mask=of_unit & (left > 0), other=0)
            source = tl.where(m < static, m, tl.load(stops + left, mask=of_unit, other=0) + w - before)
            wanted = m < static + out
            row = tl.load(order + bh * capacity + source, mask=wanted, other=-1) if MAPPED else source + first
            tl.store(rows + bh * budget + m, tl.where(wanted, row, -1), mask=m < budget)
        tl.store(taken + bh, static + out)


def launch(
    query: Tensor,
    digests: Tensor,
    stops: Tensor,
    order: Tensor | None,
    counts: Tensor,
    *,
    first: int,
    budget: int,
    scale: float,
    policy: Policy,
) -> tuple[Tensor, Tensor]:
    """The Triton kernels; arguments and result as in `definition`. All tensors contiguous; static shapes, no host sync."""
    batch, heads, units = digests.shape[:3]
    assert order is None or (order.is_contiguous() and order.dtype == torch.int32), "order is not contiguous int32"
    scores, parts = unit_scores.launch(query, digests, stops, counts, scale=scale, mean=policy == "mean_query")
    blocks, padded = parts.shape[2], parts.shape[4]
    keys, ends = query.new_empty((2, batch, heads, units), dtype=torch.int32)
    rows, taken = query.new_empty((batch, heads, budget), dtype=torch.int32), query.new_empty((batch, heads), dtype=torch.int32)
    block = min(4096, max(128, triton.next_power_of_2(units)))
    _choose[(batch * heads,)](
        scores, parts, stops, stops if order is None else order, counts, keys, ends, rows, taken, first, budget, heads, units,
        blocks, 0 if order is None else order.shape[2], GS=scores.shape[2], GP=padded, BLOCK=block, SCORED=unit_scores.BLOCK,
        PARTS=64, STEPS=units.bit_length(), ROWS=min(1024, max(32, triton.next_power_of_2(budget))),
        MAPPED=order is not None, MEAN=policy == "mean",
        num_warps=max(4, block // 256),
    )  # fmt: skip
    return rows, taken


def unit_select(
    query: Tensor,
    digests: Tensor,
    stops: Tensor,
    order: Tensor | None,
    counts: Tensor,
    *,
    first: int,
    budget: int,
    scale: float,
    policy: Policy,
) -> tuple[Tensor, Tensor]:
    """As `definition`: the kernels on a GPU, vectorised torch elsewhere."""
    if HAS_TRITON and query.device.type == "cuda":
        return launch(query, digests, stops, order, counts, first=first, budget=budget, scale=scale, policy=policy)
    return vectorised(query, digests, stops, order, counts, first=first, budget=budget, scale=scale, policy=policy)
