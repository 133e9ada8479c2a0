"""Units of tokens with a digest each: what ClusterKV, Quest, ArkVale and PRKV have in common.

A lane's tokens stand in a map, unit after unit; a unit has a digest and a stop in the map. Tokens come in batches (a page, or
the tokens that are clustered together). A batch that is not full yet is cut into units of `size` tokens in text order and
their digests are made anew with every append, so that every token can be selected as soon as it has come.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from kvthaw.cache.side_stream import SideStream
from kvthaw.cache.together import Together
from kvthaw.index.target import Full, Target
from kvthaw.kernels.extend import Place, Tables, extend, means
from kvthaw.kernels.page_bounds import Spread, page_bounds
from kvthaw.kernels.unit_scores import RecentQueries
from kvthaw.kernels.unit_select import Policy, check_policy, unit_select
from kvthaw.types import LayerShape, Selection


@dataclass(slots=True)
class Lane:
    """What the host knows of a lane: tokens and units in its tables, how many of the last tokens' keys are kept (at most a
    batch), and (tokens, units) before each batch, or before several that came together."""

    tokens: int = 0
    units: int = 0
    kept: int = 0
    marks: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])

    def begin_anew(self, batch: int) -> None:
        """The next token begins a batch if the last one, of at most so many tokens, is full or cut off."""
        if self.kept in (0, batch) and self.marks[-1] != (self.tokens, self.units):
            self.marks.append((self.tokens, self.units))
            self.kept = 0

    def take(self, n: int, size: int, batch: int) -> list[tuple[int, int]]:
        """Count n more tokens of the last batch and of those behind it. (tokens, units) before each batch that is full now."""
        begin, before = self.marks[-1]
        n += self.kept
        last, per = (n - 1) // batch, batch // size
        starts = [(begin + i * batch, before + i * per) for i in range(last + 1)]
        if batch > size:
            self.marks += starts[1:]
        elif last:
            self.marks.append(starts[-1])
        self.kept = n - last * batch
        self.tokens, self.units = begin + n, before + -(-n // size)
        return starts[: n // batch]

    def copy(self) -> Lane:
        """The same with marks of its own."""
        return replace(self, marks=list(self.marks))


@dataclass(frozen=True, slots=True)
class Before:
    """A lane before its last append: its tokens, units and kept keys, how many marks it had (an append adds to them and changes
    none), and what was written over and cannot be made again: table, first place, [H, n, ...]."""

    tokens: int
    units: int
    kept: int
    marks: int
    parts: tuple[tuple[str, int, Tensor], ...]

    def copy(self) -> Before:
        """The same with parts of its own."""
        return replace(self, parts=tuple((name, start, part.clone()) for name, start, part in self.parts))


class UnitIndex:
    """Tables of units, and selection by digest. Subclasses say how a batch becomes units.

    digests [B, H, U, E], stops [B, H, U + 1] int32, counts [B] int32, order [B, H, T] int32 or None (text order), recent
    [B, H, batch + buffer, D]: the keys of the last tokens, a ring by their places in the map, so that what leaves the tokens' ring
    at once finds room beside the last batch. All on the device, at a capacity that doubles, written in place. What an append
    writes over is kept, or can be made again, until the next, so that it can be undone.
    """

    graph_safe = True
    grows = False
    on_host = False
    mapped = False
    """Units hold tokens of any place in the text: there is an order."""
    shuffled = False
    """And so do batches: a token's place in the map says nothing of its position."""
    spread: Spread | None = None
    """A digest is the box around a unit's keys; None: their mean."""

    def __init__(self, shape: LayerShape, *, size: int, batch: int, width: int, policy: Policy) -> None:
        check_policy(policy)
        self.shape, self.size, self.batch, self.policy = shape, size, batch, policy
        self.first = shape.regions.sink
        heads, device = shape.kv_heads, shape.device
        self.digests = torch.zeros((0, heads, 0, width), dtype=shape.dtype, device=device)
        self.stops = torch.zeros((0, heads, 1), dtype=torch.int32, device=device)
        self.counts = torch.zeros(0, dtype=torch.int32, device=device)
        self.order = torch.zeros((0, heads, 0), dtype=torch.int32, device=device) if self.mapped else None
        length = batch + shape.regions.buffer
        self.recent = torch.zeros((0, heads, length, shape.head_dim), dtype=shape.dtype, device=device)
        self.lanes: list[Lane] = []
        self._before: dict[int, Before] = {}
        self._side = shape.side or SideStream()
        self._together = shape.together or Together()
        self._done: torch.cuda.Event | None = None

    @property
    def reversible(self) -> bool:
        """See Reversible."""
        return True

    # What a method adds

    def digest(self, keys: Tensor) -> Tensor:
        """keys [H, n, D] -> digests [H, ceil(n / size), E] of units of `size` tokens in text order, the last one partial."""
        return means(keys, self.size) if self.spread is None else page_bounds(keys, self.size, spread=self.spread)

    def close(self, full: Sequence[Full], keys: Tensor | None) -> None:
        """Batches are full; their units in text order are in the tables. keys [R, H, n, batch, D]: of n batches of a lane each, of
        which the first is given; None: one batch each, whose keys are the last."""

    def take_values(self, lanes: Sequence[int], values: Tensor) -> None:
        """The values [R, H, n, D] of the tokens that lanes get next, before these are in the tables."""

    def know(self, lanes: Sequence[int]) -> None:
        """Lanes have other numbers of tokens or units than before."""

    def watch(self, lanes: int) -> RecentQueries | None:
        """What takes the queries that select() is asked with, of the first lanes; None for an index that forgets them."""
        return None

    # Index

    def make_room(self, lanes: int, tokens: int) -> None:
        """See Index."""
        self.reserve(lanes)
        self.reserve(0, self.most_units(tokens), tokens)

    def build(self, lane: int, first: int, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        """See Index."""
        self.truncate(lane, 0)
        self.first = first
        self.append([lane], keys[None], values[None], None)

    def append(self, lanes: Sequence[int], keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        """See Index."""
        self.join()
        n = keys.shape[2]
        self.reserve(max(lanes) + 1)
        self.reserve(
            0, max(self.lanes[i].units for i in lanes) + -(-n // self.size) + 1, max(self.lanes[i].tokens for i in lanes) + n
        )
        for lane in lanes:
            self._before[lane] = self._saved(lane, n)
            if n:
                self.lanes[lane].begin_anew(self.batch)
        self.take_values(lanes, values)
        self._add(lanes, keys)

    def select(self, query: Tensor, budget: int) -> Selection:
        """See Index."""
        batch = query.shape[0]
        self.join()
        self.reserve(batch)
        units = self.digests.shape[2]
        if query.device.type == "cpu":  # no kernel that stops at the lanes' lengths
            units = max(lane.units for lane in self.lanes[:batch])
        rows, counts = unit_select(
            query,
            self.digests[:batch, :, :units],
            self.stops[:batch, :, : units + 1],
            None if self.order is None else self.order[:batch],
            self.counts[:batch],
            first=self.first,
            budget=budget,
            scale=self.shape.scale,
            policy=self.policy,
            recent=self.watch(batch),
        )
        return Selection(rows, counts)

    def truncate(self, lane: int, length: int) -> None:
        """See Index. A batch whose keys are kept is cut exactly; of an older unit that is cut, the digest stays."""
        keep = max(0, length - self.first)
        if lane >= len(self.lanes) or keep >= self.lanes[lane].tokens:
            return
        self.join()
        self._before.pop(lane, None)
        host = self.lanes[lane]
        if keep == 0:
            self._set(lane, Lane())
            return
        whole, units = True, host.units
        marks = [(0, 0)] if self.shuffled else host.marks
        while marks[-1][0] >= keep:
            units = marks.pop()[1]
            whole = False
        begin, before = marks[-1]
        if whole and host.kept and host.tokens - host.kept == begin and not self.shuffled:
            self._again(lane, begin, before, keep - begin, marks)
            return
        if self.order is None:
            self.stops[lane].clamp_(max=keep)
            units = before + -(-(keep - begin) // self.size)
        else:
            order = self.order[lane, :, : host.tokens]
            kept = order < length
            upto = torch.nn.functional.pad(kept.cumsum(dim=1), (1, 0))
            stops = self.stops[lane, :, : units + 1]
            stops.copy_(upto.gather(1, stops.long()))
            order[:, :keep] = order[kept].view(-1, keep)
        self._set(lane, Lane(keep, units, 0, [*marks, (keep, units)]))

    def undo(self, lane: int, length: int) -> None:
        """See Reversible."""
        last = self._before.pop(lane, None)
        if last is None:
            self.truncate(lane, length)
            return
        self.join()
        for name, start, part in last.parts:
            getattr(self, name)[lane, :, start : start + part.shape[1]] = part
        marks = self.lanes[lane].marks
        del marks[last.marks :]
        if last.kept in (0, self.batch):
            self._set(lane, Lane(last.tokens, last.units, last.kept, marks))
        else:  # the units of the batch are made again
            self._again(lane, *marks[-1], last.kept, marks)

    def reorder(self, lanes: Sequence[int]) -> None:
        """See Index."""
        self.join()
        self.reserve(max(lanes) + 1)
        which = torch.tensor(lanes, device=self.counts.device)
        for name in self._tables():
            setattr(self, name, getattr(self, name).index_select(0, which))
        self.lanes = [self.lanes[lane].copy() for lane in lanes]
        self._before = {i: self._before[lane].copy() for i, lane in enumerate(lanes) if lane in self._before}

    def tensors(self) -> list[Tensor]:
        """See Index."""
        return [getattr(self, name) for name in self._tables()]

    def clone_from(self, other: Self) -> None:
        """See Index."""
        self.join()
        other.join()
        for name in self._tables():
            setattr(self, name, getattr(other, name).clone())
        self.lanes = [lane.copy() for lane in other.lanes]
        self._before = {lane: last.copy() for lane, last in other._before.items()}
        self.first = other.first

    # Work beside the current stream, and work of several layers

    def beside(self, job: Callable[[], None], *used: Tensor) -> None:
        """Run a job that writes tables on the side stream, where there is one. used: tensors of others that it reads."""
        self._done = self._side.run(self.shape.device, job, *used)

    def put_off(self, kind: Hashable, work: Callable[[Sequence[Any]], None], item: Any) -> None:
        """Have work(items) write tables once for all indexes of the cache that have an item of a kind; join() sees to it."""
        self._together.put_off(self, kind, work, item)

    def join(self) -> None:
        """What follows on the current stream sees what was done beside it or put off; the host does not wait."""
        self._together.do_for(self)
        if self._done is not None:
            torch.cuda.current_stream(self.shape.device).wait_event(self._done)
            self._done = None

    # Inside

    def most_units(self, tokens: int) -> int:
        """The most units that so many tokens of a lane make, in whatever pieces they come, and one."""
        return tokens // self.size + self.batch // self.size + 3

    def reserve(self, lanes: int, units: int = 0, tokens: int = 0) -> None:
        """Room for so many lanes, units and tokens; what is there stays. Addresses change only where room was lacking."""
        self.lanes += [Lane() for _ in range(lanes - len(self.lanes))]
        many, have, known = len(self.lanes), self.digests.shape[2], 0 if self.order is None else self.order.shape[2]
        if many <= self.counts.shape[0] and units <= have and (self.order is None or tokens <= known):
            return
        self.join()
        units = have if units <= have else max(units + units // 4 + 64, 2 * have)
        self.digests = grown(self.digests, many, units)
        self.stops = grown(self.stops, many, units + 1)
        self.counts = grown(self.counts, many)
        self.recent = grown(self.recent, many)
        if self.order is not None:
            self.order = grown(self.order, many, known if tokens <= known else max(tokens + tokens // 4 + 64, 2 * known))

    def _tables(self) -> list[str]:
        return ["digests", "stops", "counts", "recent"] + ["order"] * (self.order is not None)

    def _set(self, lane: int, host: Lane) -> None:
        self.lanes[lane] = host
        self.counts[lane].fill_(host.units)
        if not host.tokens:
            self.stops[lane, :, 0] = 0
        self.know([lane])

    def _whole(
        self, lane: int, first: int, keys: Tensor, count: int, form: Callable[[Sequence[Full], Tensor, int], None]
    ) -> None:
        """A lane's prompt, keys [H, T, D], becomes `count` units at once, in a batch of its own: form(batches, keys [1, H, 1, T,
        D], count) writes them in the tables, beside the current stream."""
        self.truncate(lane, 0)
        self.first = first
        tokens = keys.shape[1]
        if not tokens:
            return
        self.reserve(lane + 1)
        self.reserve(0, count + 1, tokens)
        self.beside(lambda: form([Full(lane, 0, 0)], keys[None, :, None], count), keys)
        self._set(lane, Lane(tokens, count, 0, [(0, 0), (tokens, count)]))

    def _fits(self, lane: int, n: int) -> bool:
        """Whether the keys of the last batch stay where they are when n more come."""
        return self.lanes[lane].kept + n <= self.recent.shape[2]

    def _saved(self, lane: int, n: int) -> Before:
        """What an append of n tokens will write over, but for what the kept keys say."""
        host = self.lanes[lane]
        lost = host.kept and not self._fits(lane, n)
        parts = tuple((name, 0, getattr(self, name)[lane].clone()) for name in self._rings()) if lost else ()
        return Before(host.tokens, host.units, host.kept, len(host.marks), parts)

    def _rings(self) -> list[str]:
        """Tables that hold the last tokens by their places in the map."""
        return ["recent"]

    def _add(self, lanes: Sequence[int], keys: Tensor) -> None:
        """The next tokens of some lanes, keys [R, H, n, D]; there is room."""
        n = keys.shape[2]
        if not n:
            return
        if all(self._fits(lane, n) for lane in lanes):
            self._grow(lanes, keys)
            return
        for i, lane in enumerate(lanes):
            grow = self._grow if self._fits(lane, n) else self._join_many
            grow([lane], keys[i : i + 1])

    def _grow(self, lanes: Sequence[int], keys: Tensor) -> None:
        """So few tokens that what is kept stays where it is: few launches, for it is what happens whenever tokens leave rings."""
        hosts = [self.lanes[lane] for lane in lanes]
        self.extend(keys, [Place(lane, host.kept, *host.marks[-1]) for lane, host in zip(lanes, hosts, strict=True)])
        n = keys.shape[2]
        full = [Full(lane, *of) for lane, host in zip(lanes, hosts, strict=True) for of in host.take(n, self.size, self.batch)]
        if full:
            self.close(full, None)
        self.know(lanes)

    def extend(self, keys: Tensor, places: Sequence[Place]) -> None:
        """Keys [R, H, n, D] enter the tables at their places, and the units that they begin or fill get their digests."""
        self._extend(keys, places, self.digests)

    def _extend(self, keys: Tensor, places: Sequence[Place], digests: Tensor | None) -> None:
        tables = Tables(self.recent, self.stops, self.counts, self.order, digests)
        where = self._together.numbers(places, keys.device)
        extend(keys, tables, places, where, size=self.size, first=self.first, spread=self.spread)

    def _join_many(self, lanes: Sequence[int], keys: Tensor) -> None:
        """So many tokens of a lane that there is no room for them beside what is kept, keys [1, H, n, D]."""
        (lane,), host = lanes, self.lanes[lanes[0]]
        begin, before = host.marks[-1]
        known, old = host.kept, self._kept(lane, begin, host.kept)
        together = torch.cat((old, keys[0]), dim=1) if known else keys[0]
        n = together.shape[1]
        found = self.digest(together)
        stop = before + found.shape[1]
        self.digests[lane, :, before:stop] = found.to(self.digests.dtype)
        ends = torch.arange(begin, begin + (stop - before + 1) * self.size, self.size, dtype=torch.int32, device=keys.device)
        self.stops[lane, :, before : stop + 1] = ends.clamp_(max=begin + n)  # the first as it is, but for a lane's first
        if self.order is not None:
            span = (self.first + begin + known, self.first + begin + n)
            self.order[lane, :, begin + known : begin + n] = torch.arange(*span, dtype=torch.int32, device=keys.device)
        self.counts[lane].fill_(stop)
        full = host.take(n - known, self.size, self.batch)
        if full:
            batches = together[None, :, : len(full) * self.batch].unflatten(2, (len(full), self.batch))
            self.close([Full(lane, *full[0])], batches)
        self._keep(lane, begin + n - host.kept, together[:, n - host.kept :])
        self.know(lanes)

    def last(self, full: Sequence[Full], table: Tensor) -> Tensor:
        """Of the last batches of lanes what a table holds by places in the map, [R, H, batch, D]."""
        return table[self._last(full, self.batch)]

    def _last(self, full: Sequence[Full], n: int) -> tuple[Tensor, Tensor, Tensor]:
        """Indices of a table of the last tokens: of each lane n tokens; made once for all layers."""
        own, heads, ring, device = tuple(full), self.shape.kv_heads, self.recent.shape[2], self.shape.device
        return self._together.once((own, n, ring, heads, device), lambda: Target.of(own, heads, device).places(n, ring))

    def _again(self, lane: int, begin: int, before: int, n: int, marks: list[tuple[int, int]]) -> None:
        """A lane ends with the first n tokens of a batch, whose keys are kept."""
        keys = self._kept(lane, begin, n)
        self._set(lane, Lane(begin, before, 0, marks))
        self._add([lane], keys[None])

    def _kept(self, lane: int, begin: int, n: int) -> Tensor:
        """Keys [H, n, D] of a lane's last tokens, from place `begin` of the map on."""
        return self.recent[lane].index_select(1, self._ring(begin, n))

    def _keep(self, lane: int, begin: int, keys: Tensor) -> None:
        """Keys [H, n, D], n no more than a batch, become a lane's last, from place `begin` of the map on."""
        self.recent[lane].index_copy_(1, self._ring(begin, keys.shape[1]), keys)

    def _ring(self, begin: int, n: int) -> Tensor:
        """Where places of the map from `begin` on stand among the last tokens."""
        return torch.arange(begin, begin + n, device=self.recent.device) % self.recent.shape[2]


def grown(table: Tensor, lanes: int, length: int | None = None) -> Tensor:
    """A table with at least so many lanes and, in dimension 2, so many places; itself where it is large enough."""
    shape = [max(lanes, table.shape[0]), *table.shape[1:]]
    if length is not None:
        shape[2] = max(length, table.shape[2])
    if shape == list(table.shape):
        return table
    larger = table.new_zeros(shape)
    larger[tuple(slice(0, n) for n in table.shape)] = table
    return larger
