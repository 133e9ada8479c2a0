"""Units of tokens with digests: the common base of ClusterKV, Quest, ArkVale and PRKV.

A map lists a sequence's tokens, unit after unit. A unit has a digest and a stop in the map. Tokens come in batches (a page,
or the tokens that are clustered together). A batch that is not full yet is cut into units of `size` tokens in text order.
Their digests are recomputed with every append, so every token can be selected at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self, get_args

import torch
from torch import Tensor

from kvthaw.cache.index_api import Index, IndexContext, Selection, Traits
from kvthaw.cache.streams import AuxStream
from kvthaw.errors import one_of
from kvthaw.index.tables import Column, Full, Held, TablesOnDevice, Target
from kvthaw.kernels.extend import Added, Destination, Tables, extend, means
from kvthaw.kernels.page_bounds import Spread, page_bounds
from kvthaw.kernels.unit_scores import RecentQueries
from kvthaw.kernels.unit_select import Policy, unit_select


@dataclass(slots=True)
class Seq:
    """Counts of a sequence on the host.

    tokens, units: in its tables.
    kept: how many of the last tokens' keys are kept, at most a batch.
    marks: (tokens, units) before each batch, or before several batches that came together.
    """

    tokens: int = 0
    units: int = 0
    kept: int = 0
    marks: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])

    def begin_anew(self, batch: int) -> None:
        """Start a new batch if the last one is full or was cut.

        batch: the most tokens of a batch.
        """
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

    def __copy__(self) -> Seq:
        return replace(self, marks=list(self.marks))


@dataclass(frozen=True, slots=True)
class Before:
    """A sequence before its last append: its tokens, units and kept keys, the number of its marks, and overwritten data.

    An append adds marks and changes none. Overwritten data that cannot be recomputed is kept as (table, first place, [H, n,
    ...]).
    """

    tokens: int
    units: int
    kept: int
    marks: int
    parts: tuple[tuple[str, int, Tensor], ...]

    def copy(self) -> Before:
        """Return a copy."""
        return replace(self, parts=tuple((name, start, part.clone()) for name, start, part in self.parts))


class UnitIndex(TablesOnDevice, Index):
    """Tables of units, and selection by digest. Subclasses say how a batch becomes units.

    A digest is the mean of a unit's keys, or the box around them (`spread`). A subclass with digests of another kind overrides
    digest(). A subclass with another score replaces `choice`.

    All `tables` are on the device, with a capacity that doubles, and are written in place. Data that an append overwrites is
    kept, or can be recomputed, until the next append, so that undo() works.

    digests: [B, H, U, E].
    stops: [B, H, U + 1] int32.
    counts: [B] int32.
    order: [B, H, T] int32; only if `mapped`.
    recent: [B, H, batch + buffer, D], the keys of the last tokens, a ring by their places in the map. It holds the last
        batch and all tokens that leave the window at once.
    """

    traits = Traits(graph_safe=True, grows=False, reversible=True)
    mapped = False
    """Units hold tokens of any place in the text: there is an order."""
    shuffled = False
    """Whether a token's place in the map is unrelated to its position."""
    spread: Spread | None = None
    """A digest is the box around a unit's keys; None: their mean."""
    choice = staticmethod(unit_select)
    """Ranks units for a query and returns rows and counts. It takes the arguments of `unit_select` and reads only tables."""
    digests = Column()
    stops = Column()
    counts = Column()
    recent = Column()
    order = Column()

    def __init__(self, context: IndexContext, *, size: int, batch: int, width: int, policy: Policy) -> None:
        one_of(get_args(Policy), policy=policy)
        super().__init__(context)
        self.size, self.batch, self.policy = size, batch, policy
        heads = context.kv_heads
        self.tables.add("digests", (heads, "units", width), context.dtype)
        self.tables.add("stops", (heads, "ends"), torch.int32)
        self.tables.add("counts", (), torch.int32)
        self.tables.add("recent", (heads, batch + context.regions.buffer, context.head_dim), context.dtype)
        if self.mapped:
            self.tables.add("order", (heads, "tokens"), torch.int32)
        self.seqs = self.tables.host(Seq)
        self._before: dict[int, Before] = {}
        self._side = context.aux or AuxStream()
        self._done: torch.cuda.Event | None = None

    # What a method adds

    def digest(self, keys: Tensor) -> Tensor:
        """Return the digests [H, ceil(n / size), E] of units of `size` tokens in text order, the last one partial.

        keys: [H, n, D], a prompt's or the last ones of a sequence. H counts the heads of all sequences and layers that are
            computed at once.
        """
        return means(keys, self.size) if self.spread is None else page_bounds(keys, self.size, spread=self.spread)

    def kind(self) -> Hashable:
        """Return a value that indexes of other layers share if their digest() is equal to this one's. By default none does."""
        return self

    def close(self, full: Sequence[Full], keys: Tensor | None) -> None:
        """Form the units of full batches, which replace the batches' units in text order in the tables.

        full: the first batch of each sequence.
        keys: [R, H, n, batch, D], of n batches of each sequence; None: one batch each, whose keys are the last ones.
        """

    def take_values(self, seqs: Sequence[int], values: Tensor) -> None:
        """Take the values [R, H, n, D] of new tokens, before their keys enter the tables."""

    def sync_counts(self, seqs: Sequence[int]) -> None:
        """Update the device tensors that depend on the numbers of tokens and units of these sequences."""

    def recent_queries(self, seqs: int) -> RecentQueries | None:
        """Return where select() records the queries of the first sequences, None for an index that does not keep them."""
        return None

    # Index

    def make_room(self, seqs: int, tokens: int) -> None:
        self.reserve(seqs, self.most_units(tokens) if tokens else 0, tokens)

    def lengths(self, seq: int) -> dict[str, int]:
        return self._lengths(self.seqs[seq].units, self.seqs[seq].tokens)

    def build(self, seq: int, first: int, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        self.clear(seq, first)
        self.append([seq], keys[None], values[None], None)

    def append(self, seqs: Sequence[int], keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        self.join()
        n = keys.shape[2]
        self.reserve(max(seqs) + 1)
        self.reserve(
            0, max(self.seqs[i].units for i in seqs) + -(-n // self.size) + 1, max(self.seqs[i].tokens for i in seqs) + n
        )
        for seq in seqs:
            self._before[seq] = self._saved(seq, n)
            if n:
                self.seqs[seq].begin_anew(self.batch)
        self.take_values(seqs, values)
        self._add(seqs, keys)

    def select(self, query: Tensor, budget: int) -> Selection:
        batch, tables = query.shape[0], self.tables
        self.join()
        if batch > tables.seqs:
            self.reserve(batch)
        units = self.looked_at(batch)
        rows, counts = self.choice(
            query,
            tables["digests"][:batch, :, :units],
            tables["stops"][:batch, :, : units + 1],
            tables["order"][:batch] if self.mapped else None,
            tables["counts"][:batch],
            first=self.first,
            budget=budget,
            scale=self.context.scale,
            policy=self.policy,
            recent=self.recent_queries(batch),
        )
        return Selection(rows, counts)

    def truncate(self, seq: int, length: int) -> None:
        """See Index. A batch whose keys are kept is cut exactly; of an older unit that is cut, the digest stays."""
        keep = max(0, length - self.first)
        if seq >= len(self.seqs) or keep >= self.seqs[seq].tokens:
            return
        self.join()
        self._before.pop(seq, None)
        host = self.seqs[seq]
        if keep == 0:
            self._set(seq, Seq())
            return
        whole, units = True, host.units
        marks = [(0, 0)] if self.shuffled else host.marks
        while marks[-1][0] >= keep:
            units = marks.pop()[1]
            whole = False
        begin, before = marks[-1]
        if whole and host.kept and host.tokens - host.kept == begin and not self.shuffled:
            self._again(seq, begin, before, keep - begin, marks)
            return
        if not self.mapped:
            self.stops[seq].clamp_(max=keep)
            units = before + -(-(keep - begin) // self.size)
        else:
            order = self.order[seq, :, : host.tokens]
            kept = order < length
            upto = torch.nn.functional.pad(kept.cumsum(dim=1), (1, 0))
            stops = self.stops[seq, :, : units + 1]
            stops.copy_(upto.gather(1, stops.long()))
            order[:, :keep] = order[kept].view(-1, keep)
        self._set(seq, Seq(keep, units, 0, [*marks, (keep, units)]))

    def undo(self, seq: int, length: int) -> None:
        last = self._before.pop(seq, None)
        if last is None:
            self.truncate(seq, length)
            return
        self.join()
        for name, start, part in last.parts:
            self.tables[name][seq, :, start : start + part.shape[1]] = part
        marks = self.seqs[seq].marks
        del marks[last.marks :]
        if last.kept in (0, self.batch):
            self._set(seq, Seq(last.tokens, last.units, last.kept, marks))
        else:  # the units of the batch are made again
            self._again(seq, *marks[-1], last.kept, marks)

    def reorder(self, seqs: Sequence[int]) -> None:
        super().reorder(seqs)
        self._before = {i: self._before[seq].copy() for i, seq in enumerate(seqs) if seq in self._before}

    def load(self, seq: int, held: Held, end: int) -> None:
        host: Seq = held[1][0]
        self.reserve(seq + 1, host.units, host.tokens)
        super().load(seq, held, end)
        self.sync_counts([seq])

    def clone_from(self, other: Self) -> None:
        super().clone_from(other)
        self._before = {seq: last.copy() for seq, last in other._before.items()}

    # Work on the side stream, and work of several layers

    def beside(self, job: Callable[[], object], *used: Tensor) -> None:
        """Run a job that writes tables on the side stream, if there is one.

        used: tensors that the job reads and others own.
        """
        self._done = self._side.run(self.context.device, job, *used)

    def defer(self, kind: Hashable, work: Callable[[Sequence[Any]], None], item: Any, seqs: Iterable[int]) -> None:
        """Queue an item for work(items), which writes tables of these sequences for all indexes of the cache in one call; join()
        runs it."""
        self._deferred.defer(self, kind, work, item, seqs)

    def join(self) -> None:
        """Run deferred work, and have the current stream wait for the side stream; the host does not wait."""
        if self in self._deferred.owners:
            self._deferred.flush()
        if self._done is not None:
            torch.cuda.current_stream(self.context.device).wait_event(self._done)
            self._done = None

    # Inside

    def looked_at(self, batch: int) -> int:
        """Return how many units of the first sequences select() looks at."""
        return self.context.looked_at([seq.units for seq in self.seqs[:batch]], self.tables.room["units"], self.most_units)

    def most_units(self, tokens: int) -> int:
        """Return an upper bound on the units of `tokens` tokens that come in pieces of any size."""
        return tokens // self.size + self.batch // self.size + 3

    def reserve(self, seqs: int, units: int = 0, tokens: int = 0) -> None:
        """Make room for `seqs` sequences with `units` units and `tokens` tokens, and keep the content. Addresses change only
        if room was lacking."""
        if not self.tables.lacks(seqs, **self._lengths(units, tokens)):
            return
        self.join()
        have, known = self.tables.room["units"], self.tables.room.get("tokens", 0)
        units = have if units <= have else max(units + units // 4 + 64, 2 * have)
        tokens = known if tokens <= known else max(tokens + tokens // 4 + 64, 2 * known)
        self.tables.reserve(seqs, **self._lengths(units, tokens))

    def _lengths(self, units: int, tokens: int) -> dict[str, int]:
        """Return the sizes of the dimensions that `units` and `tokens` need in the tables."""
        return {"units": units, "ends": units + 1} | ({"tokens": tokens} if self.mapped else {})

    def _set(self, seq: int, host: Seq) -> None:
        self.seqs[seq] = host
        self.counts[seq].fill_(host.units)
        if not host.tokens:
            self.stops[seq, :, 0] = 0
        self.sync_counts([seq])

    def _fits(self, seq: int, n: int) -> bool:
        """Return whether the keys of the last batch keep their places if n more tokens are added."""
        return self.seqs[seq].kept + n <= self.recent.shape[2]

    def _saved(self, seq: int, n: int) -> Before:
        """Return the data that an append of n tokens will overwrite, except what the kept keys can restore."""
        host = self.seqs[seq]
        lost = host.kept and not self._fits(seq, n)
        parts = tuple((name, 0, self.tables[name][seq].clone()) for name in self._rings()) if lost else ()
        return Before(host.tokens, host.units, host.kept, len(host.marks), parts)

    def _rings(self) -> list[str]:
        """Tables that hold the last tokens by their places in the map."""
        return ["recent"]

    def _add(self, seqs: Sequence[int], keys: Tensor) -> None:
        """Append the next tokens of some sequences, keys [R, H, n, D]. The tables have room."""
        n = keys.shape[2]
        if not n:
            return
        if all(self._fits(seq, n) for seq in seqs):
            self._grow(seqs, keys)
            return
        for i, seq in enumerate(seqs):
            grow = self._grow if self._fits(seq, n) else self._join_many
            grow([seq], keys[i : i + 1])

    def _grow(self, seqs: Sequence[int], keys: Tensor) -> None:
        """Append so few tokens that kept keys stay in place. This takes few launches, since it happens whenever tokens leave
        rings."""
        hosts = [self.seqs[seq] for seq in seqs]
        self._extend(keys, [Destination(seq, host.kept, *host.marks[-1]) for seq, host in zip(seqs, hosts, strict=True)])
        n = keys.shape[2]
        full = [Full(seq, *of) for seq, host in zip(seqs, hosts, strict=True) for of in host.take(n, self.size, self.batch)]
        if full:
            self.close(full, None)
        self.sync_counts(seqs)

    def _extend(self, keys: Tensor, places: Sequence[Destination]) -> None:
        """Queue what writes keys [R, H, n, D] to the tables at their places, and digests of the units that they begin or fill.

        One kernel writes all of them, if digests are its means or boxes. Otherwise digest() computes them after it.
        """
        by_kernel = type(self).digest is UnitIndex.digest
        digests = self.digests if by_kernel else None
        added = Added(keys, Tables(self.recent, self.stops, self.counts, self.order if self.mapped else None, digests))
        alike = tuple(places), self.size, self.first, self.spread
        work = partial(extend, places=alike[0], size=self.size, first=self.first, spread=self.spread)
        laid_out = keys.shape, keys.stride(), keys.dtype, keys.device, self.recent.shape[2], self.mapped, by_kernel
        self.defer((extend, *alike, *laid_out), work, added, (place.seq for place in places))
        if by_kernel:
            return
        equal: dict[int, list[Destination]] = {}
        for place in places:
            equal.setdefault(place.kept, []).append(place)
        for kept, some in equal.items():
            whole = kept // self.size  # units that have all of their keys, and their digests
            last = tuple(Full(place.seq, place.begin + whole * self.size, place.before + whole) for place in some)
            n = kept + keys.shape[2] - whole * self.size
            digest = partial(_digest_last, last=last, n=n)
            self.defer((self.kind(), "digest", last, n), digest, self, (place.seq for place in some))

    def _join_many(self, seqs: Sequence[int], keys: Tensor) -> None:
        """Append more tokens of a sequence than fit beyond the kept keys; keys [1, H, n, D]."""
        (seq,), host = seqs, self.seqs[seqs[0]]
        begin, before = host.marks[-1]
        known, old = host.kept, self._kept(seq, begin, host.kept)
        pending = torch.cat((old, keys[0]), dim=1) if known else keys[0]
        n = pending.shape[1]
        found = self.digest(pending)
        stop = before + found.shape[1]
        self.digests[seq, :, before:stop] = found.to(self.digests.dtype)
        ends = torch.arange(begin, begin + (stop - before + 1) * self.size, self.size, dtype=torch.int32, device=keys.device)
        self.stops[seq, :, before : stop + 1] = ends.clamp_(max=begin + n)  # the first unchanged, except a sequence's first
        if self.mapped:
            span = (self.first + begin + known, self.first + begin + n)
            self.order[seq, :, begin + known : begin + n] = torch.arange(*span, dtype=torch.int32, device=keys.device)
        self.counts[seq].fill_(stop)
        full = host.take(n - known, self.size, self.batch)
        if full:
            batches = pending[None, :, : len(full) * self.batch].unflatten(2, (len(full), self.batch))
            self.close([Full(seq, *full[0])], batches)
        self._keep(seq, begin + n - host.kept, pending[:, n - host.kept :])
        self.sync_counts(seqs)

    def last(self, full: Sequence[Full], table: Tensor) -> Tensor:
        """Return a table's entries for the last batches of sequences, by places in the map, [R, H, batch, D]."""
        return table[self.last_places(full, self.batch)]

    def last_places(self, full: Sequence[Full], n: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the indices of n tokens of each sequence, from where `full` begins, in a ring such as `recent`.

        They are made once for all layers.
        """
        own, ring = tuple(full), self.recent.shape[2]
        return self._deferred.once((own, n, ring, *self._heads()), lambda: Target.of(own, *self._heads()).places(n, ring))

    def target(self, full: Sequence[Full]) -> Target:
        """Return the places of batches of sequences in the tables; made once for all layers."""
        own = tuple(full)
        return self._deferred.once((own, *self._heads()), lambda: Target.of(own, *self._heads()))

    def _heads(self) -> tuple[int, torch.device]:
        return self.context.kv_heads, self.context.device

    def _again(self, seq: int, begin: int, before: int, n: int, marks: list[tuple[int, int]]) -> None:
        """A sequence ends with the first n tokens of a batch, whose keys are kept."""
        keys = self._kept(seq, begin, n)
        order = self.order[seq, :, begin : begin + n].clone() if self.shuffled else None
        self._set(seq, Seq(begin, before, 0, marks))
        self._add([seq], keys[None])
        if order is not None:  # places of the map are not positions
            self.join()
            self.order[seq, :, begin : begin + n] = order

    def _kept(self, seq: int, begin: int, n: int) -> Tensor:
        """Keys [H, n, D] of a sequence's last tokens, from place `begin` of the map on."""
        return self.recent[seq].index_select(1, self._ring(begin, n))

    def _keep(self, seq: int, begin: int, keys: Tensor) -> None:
        """Keys [H, n, D], n no more than a batch, become a sequence's last, from place `begin` of the map on."""
        self.recent[seq].index_copy_(1, self._ring(begin, keys.shape[1]), keys)

    def _ring(self, begin: int, n: int) -> Tensor:
        """Return where places of the map from `begin` on are in the ring of recent tokens."""
        return torch.arange(begin, begin + n, device=self.recent.device) % self.recent.shape[2]


def _digest_last(every: Sequence[UnitIndex], last: Sequence[Full], n: int) -> None:
    """Write the digests of the last n tokens of sequences, in units in text order, for indexes of one kind.

    last: where these tokens begin.
    """
    one = every[0]
    own = torch.stack([index.recent[index.last_places(last, n)] for index in every])
    made = one.digest(own.flatten(0, 2)).unflatten(0, own.shape[:3])
    where = one.target(last).units(made.shape[3])
    for index, digests in zip(every, made.unbind(), strict=True):
        index.digests[where] = digests.to(index.digests.dtype)
