"""Units of tokens with a digest each: what ClusterKV, Quest, ArkVale and PRKV have in common.

A lane's tokens stand in a map, unit after unit; a unit has a digest and a stop in the map. Tokens come in batches (a page, or
the tokens that are clustered together). A batch that is not full yet is cut into units of `size` tokens in text order and
their digests are made anew with every append, so that every token can be selected as soon as it has come.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvthaw.cache.side_stream import SideStream
from kvthaw.cache.together import Together
from kvthaw.kernels.extend import Place, extend
from kvthaw.kernels.unit_scores import Watch
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

    def told(self) -> tuple[int, int, int, list[tuple[int, int]]]:
        """Its fields, of the caller's own."""
        return self.tokens, self.units, self.kept, list(self.marks)


@dataclass(frozen=True, slots=True)
class Before:
    """A lane before its last append: its tokens, units and kept keys, how many marks it had (an append adds to them and changes
    none), and what was written over and cannot be made again: table, first place, [H, n, ...]."""

    tokens: int
    units: int
    kept: int
    marks: int
    parts: tuple[tuple[str, int, Tensor], ...]

    def moved(self, device: torch.device) -> Before:
        """The same with parts of its own, on a device."""
        return replace(self, parts=tuple((name, start, part.to(device, copy=True)) for name, start, part in self.parts))


class UnitIndex:
    """Tables of units, and selection by digest. Subclasses say how a batch becomes units.

    digests [B, H, U, E], stops [B, H, U + 1] int32, counts [B] int32, order [B, H, T] int32 or None (text order), recent
    [B, H, batch, D]: the keys of the last batch. All on the device, at a capacity that doubles, written in place.
    What an append writes over is kept, or can be made again, until the next, so that it can be undone.
    """

    graph_safe = True
    grows = False
    on_host = False
    mapped = False
    """Units hold tokens of any place in the text: there is an order."""
    shuffled = False
    """And so do batches: a token's place in the map says nothing of its position."""

    def __init__(self, shape: LayerShape, *, size: int, batch: int, width: int, policy: Policy) -> None:
        check_policy(policy)
        self.shape, self.size, self.batch, self.policy = shape, size, batch, policy
        self.first = shape.regions.sink
        heads, device = shape.kv_heads, shape.device
        self.digests = torch.zeros((0, heads, 0, width), dtype=shape.dtype, device=device)
        self.stops = torch.zeros((0, heads, 1), dtype=torch.int32, device=device)
        self.counts = torch.zeros(0, dtype=torch.int32, device=device)
        self.order = torch.zeros((0, heads, 0), dtype=torch.int32, device=device) if self.mapped else None
        self.recent = torch.zeros((0, heads, batch, shape.head_dim), dtype=shape.dtype, device=device)
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
        raise NotImplementedError

    def close(self, lane: int, begin: int, before: int, keys: Tensor) -> None:
        """Batches are full: keys [H, n, batch, D]. The first begins at `begin` in the map and at unit `before`; units in text
        order are in the tables."""

    def watch(self, lanes: int) -> Watch | None:
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
        for i, lane in enumerate(lanes):
            self._before[lane] = self._saved(lane, n)
            self._add(lane, keys[i])

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
            watch=self.watch(batch),
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
            keys = self.recent[lane, :, : keep - begin].clone()
            self._set(lane, Lane(begin, before, 0, marks))
            self._add(lane, keys)
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
            self._set(lane, Lane(*marks[-1], 0, marks))
            self._add(lane, self.recent[lane, :, : last.kept].clone())

    def reorder(self, lanes: Sequence[int]) -> None:
        """See Index."""
        self.join()
        self.reserve(max(lanes) + 1)
        which = torch.tensor(lanes, device=self.counts.device)
        for name in self._tables():
            setattr(self, name, getattr(self, name).index_select(0, which))
        self.lanes = [Lane(*self.lanes[lane].told()) for lane in lanes]
        device = self.shape.device
        self._before = {i: self._before[lane].moved(device) for i, lane in enumerate(lanes) if lane in self._before}

    def state_dict(self) -> dict[str, Any]:
        """See Index."""
        self.join()
        state: dict[str, Any] = {name: getattr(self, name).clone() for name in self._tables()}
        before = {}
        for lane, last in self._before.items():
            before[lane] = last.tokens, last.units, last.kept, last.marks, last.moved(self.shape.device).parts
        return state | {"lanes": [lane.told() for lane in self.lanes], "before": before, "first": self.first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Index."""
        self.join()
        for name in self._tables():
            setattr(self, name, state[name].to(self.shape.device, copy=True))
        self.lanes = [Lane(tokens, units, kept, list(marks)) for tokens, units, kept, marks in state["lanes"]]
        self._before = {lane: Before(*told).moved(self.shape.device) for lane, told in state["before"].items()}
        self.first = int(state["first"])

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
        self.recent = grown(self.recent, many, self.batch)
        if self.order is not None:
            self.order = grown(self.order, many, known if tokens <= known else max(tokens + tokens // 4 + 64, 2 * known))

    def _tables(self) -> list[str]:
        return ["digests", "stops", "counts", "recent"] + ["order"] * (self.order is not None)

    def _set(self, lane: int, host: Lane) -> None:
        self.lanes[lane] = host
        self.counts[lane].fill_(host.units)
        if not host.tokens:
            self.stops[lane, :, 0] = 0

    def _whole(
        self, lane: int, first: int, keys: Tensor, count: int, form: Callable[[int, int, int, Tensor, int], None]
    ) -> None:
        """A lane's prompt, keys [H, T, D], becomes `count` units at once, in a batch of its own: form(lane, begin, before, keys
        [H, 1, T, D], count) writes them in the tables, beside the current stream."""
        self.truncate(lane, 0)
        self.first = first
        tokens = keys.shape[1]
        if not tokens:
            return
        self.reserve(lane + 1)
        self.reserve(0, count + 1, tokens)
        self.beside(lambda: form(lane, 0, 0, keys[:, None], count), keys)
        self._set(lane, Lane(tokens, count, 0, [(0, 0), (tokens, count)]))

    def _saved(self, lane: int, n: int) -> Before:
        """What an append of n tokens will write over, but for what the kept keys say."""
        host, parts = self.lanes[lane], []
        if host.kept and (host.kept == self.batch or host.kept + n > self.batch):
            parts.append(("recent", 0, self.recent[lane, :, : host.kept].clone()))
        return Before(host.tokens, host.units, host.kept, len(host.marks), tuple(parts))

    def _add(self, lane: int, keys: Tensor) -> None:
        """The next tokens of a lane, keys [H, n, D]; there is room."""
        host = self.lanes[lane]
        if not keys.shape[1]:
            return
        if host.kept in (0, self.batch) and host.marks[-1] != (host.tokens, host.units):
            host.marks.append((host.tokens, host.units))
            host.kept = 0
        begin, before = host.marks[-1]
        if host.kept + keys.shape[1] <= self.batch:
            self._grow(lane, begin, before, keys)
            return
        together = torch.cat((self.recent[lane, :, : host.kept], keys), dim=1) if host.kept else keys
        n = together.shape[1]
        found = self.digest(together)
        stop = before + found.shape[1]
        self.digests[lane, :, before:stop] = found.to(self.digests.dtype)
        ends = torch.arange(begin, begin + (stop - before + 1) * self.size, self.size, dtype=torch.int32, device=keys.device)
        self.stops[lane, :, before : stop + 1] = ends.clamp_(
            max=begin + n
        )  # the first as it is already, but for a lane's first
        if self.order is not None:
            span = (self.first + host.tokens, self.first + begin + n)
            self.order[lane, :, host.tokens : begin + n] = torch.arange(*span, dtype=torch.int32, device=keys.device)
        per, last = self.batch // self.size, (n - 1) // self.batch
        full = n // self.batch
        if full:
            self.close(lane, begin, before, together[:, : full * self.batch].unflatten(1, (full, self.batch)))
        if self.batch > self.size:
            host.marks += [(begin + i * self.batch, before + i * per) for i in range(1, last + 1)]
        elif last:
            host.marks.append((begin + last * self.batch, before + last * per))
        host.kept = n - last * self.batch
        self.recent[lane, :, : host.kept] = together[:, last * self.batch :]
        host.tokens, host.units = begin + n, stop
        self.counts[lane].fill_(stop)

    def _grow(self, lane: int, begin: int, before: int, keys: Tensor) -> None:
        """The next tokens of the batch that begins at `begin` in the map and at unit `before`: few launches, for it is what happens
        whenever tokens leave a ring."""
        host, recent = self.lanes[lane], self.recent[lane]
        order = None if self.order is None else self.order[lane]
        place = Place(host.kept, begin, before, self.size, self.first)
        extend(keys, recent, self.stops[lane], self.counts[lane], order, place)
        whole = host.kept // self.size  # units that have all of their tokens, and their digests
        host.kept += keys.shape[1]
        found = self.digest(recent[:, whole * self.size : host.kept])
        host.tokens, host.units = begin + host.kept, before + whole + found.shape[1]
        self.digests[lane, :, before + whole : host.units] = found
        if host.kept == self.batch:
            self.close(lane, begin, before, recent[:, None])


def means(keys: Tensor, size: int) -> Tensor:
    """The mean of every `size` keys [H, n, D], in float32; the last ones may be fewer. [H, ceil(n / size), D]."""
    full = keys.shape[1] // size * size
    parts = [keys[:, :full].unflatten(1, (-1, size)).mean(dim=2, dtype=torch.float32)] if full else []
    if full < keys.shape[1]:
        parts.append(keys[:, full:].mean(dim=1, keepdim=True, dtype=torch.float32))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


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
