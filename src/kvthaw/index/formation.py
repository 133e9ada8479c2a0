"""Form units from batches of tokens: at once, or in pieces during the steps before they are needed."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvthaw.cache.deferred_batch import AuxStream
from kvthaw.index.draws import stream
from kvthaw.index.target import Full, Target
from kvthaw.index.units import UnitIndex
from kvthaw.kernels.kmeans import whole

AT_ONCE = 1 << 28
"""Limit on the bytes of keys that are clustered at once, but at least one layer: many sequences would need much memory."""

Formed = tuple[Tensor, Tensor, Tensor]
"""Units of M batches of H heads: digests [M H, C, E], order [M H, T] of a batch's tokens, stops [M H, C + 1].

Unit c is stops[c] : stops[c + 1] of the order.
"""


class FormingIndex(UnitIndex):
    """An index that makes units of the tokens of a batch."""

    def form(self, group: BatchGroup, count: int) -> Generator[None, None, Formed]:
        """Make `count` units of each batch of a group, in pieces."""
        raise NotImplementedError

    def pieces(self, count: int) -> int:
        """Return about how many pieces form() splits `count` units into."""
        return 1


@dataclass(frozen=True, slots=True)
class Batches:
    """Batches of tokens of an index's sequences; each batch forms units of its own tokens.

    first: the first batch of each sequence.

    given: keys [R, H, n, T, D], n batches of each sequence. None: one batch each, whose keys the index has.
    coming: [R, H, m, D], the last keys of a batch that the index does not have yet.
    """

    index: FormingIndex
    first: Sequence[Full]
    given: Tensor | None = None
    coming: Tensor | None = None

    def keys(self) -> Tensor:
        """Return the keys [R, H, n, T, D], a copy if the index has them."""
        if self.given is not None:
            return self.given
        index, known = self.index, self.index.batch - (0 if self.coming is None else self.coming.shape[2])
        keys = index.recent[index.last_places(self.first, known)]
        return (keys if self.coming is None else torch.cat((keys, self.coming), dim=2))[:, :, None]

    def nbytes(self) -> int:
        """Return the bytes of the keys."""
        return self.index.recent[0].nbytes * len(self.first) if self.given is None else self.given.nbytes


class BatchGroup:
    """Batches of indexes that differ only in the layer, with equal numbers of batches and tokens.

    keys: [M, H, n, T, D].
    positions: [M, 1, n, T].
    heads: [M, H, 1, 1], the numbers of the KV heads, from which random choices derive.
    """

    def __init__(self, every: Sequence[Batches]) -> None:
        self.every = every
        keys = torch.cat([each.keys() for each in every]) if len(every) > 1 else every[0].keys().contiguous()
        of_rows = [(each.index.first, stream(each.index.context), own) for each in every for own in each.first]
        where = [(first + own.begin, own.begin, number) for first, number, own in of_rows]
        first, begin, streams = torch.tensor(where).to(keys.device, non_blocking=True).t()[:, :, None, None, None].unbind()
        heads, batches, tokens = keys.shape[1:4]
        self.starts = torch.arange(batches, device=keys.device)[:, None] * tokens  # of each batch
        self.positions = first + self.starts + torch.arange(tokens, device=keys.device)
        self.streams = streams + torch.arange(heads, device=keys.device)[:, None, None]
        self.keys, self._first, self._begin = keys, first, begin

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors."""
        return self.keys, self.starts, self.positions, self.streams, self._first, self._begin

    def units(self, digests: Tensor, order: Tensor, stops: Tensor) -> Units:
        """Return the units of all batches in the form of the tables."""
        many, heads, batches, tokens = self.keys.shape[:4]
        count = stops.shape[1] - 1
        digests = digests.view(many, heads, batches * count, -1).to(self.every[0].index.digests.dtype)
        ends = (stops.view(many, heads, batches, -1)[..., 1:] + self.starts + self._begin).flatten(2)
        ends = torch.cat((self._begin[..., 0].expand(-1, heads, 1), ends), dim=2).int()
        places = (order.view(many, heads, batches, tokens) + self.starts + self._first).int().flatten(2)
        return Units(self.every, digests, ends, places)


@dataclass(frozen=True, slots=True)
class Units:
    """Units of batches, ready for the tables: digests [M, H, U, E], ends [M, H, U + 1], places [M, H, T]."""

    every: Sequence[Batches]
    digests: Tensor
    ends: Tensor
    places: Tensor

    def write(self, wanted: Mapping[FormingIndex, Sequence[Full]] | None = None) -> None:
        """Write the units into the tables, in one call per index if it supports that, as for a prompt.

        wanted: only these batches of these indexes; None: all.
        """
        at: dict[tuple[Full, ...], tuple[tuple[Tensor, ...], ...]] = {}
        every, alone = (self.digests, self.ends, self.places), list[tuple[Tensor, Tensor]]()
        for index, full, rows in self._rows(wanted):
            if len(full) == 1:
                seq, begin, before = full[0]
                starts = zip((index.digests, index.stops, index.order), (before, before, begin), every, strict=True)
                alone += [(table[seq, :, start : start + own.shape[2]], own[rows.start]) for table, start, own in starts]
                continue
            if full not in at:
                target = Target.of(full, self.ends.shape[1], self.ends.device)
                units = self.digests.shape[2]
                at[full] = target.units(units), target.units(units + 1), target.places(self.places.shape[2])
            tables = zip((index.digests, index.stops, index.order), at[full], strict=True)
            for (table, place), own in zip(tables, every, strict=True):
                table[place] = own[rows]
        if alone:
            torch._foreach_copy_([target for target, _ in alone], [own for _, own in alone])

    def _rows(
        self, wanted: Mapping[FormingIndex, Sequence[Full]] | None
    ) -> Iterator[tuple[FormingIndex, tuple[Full, ...], slice]]:
        """Yield indexes with their batches and these batches' rows here; one item per index if all are wanted."""
        done = 0
        for each in self.every:
            full = tuple(each.first if wanted is None else wanted.get(each.index, ()))
            if full == tuple(each.first):
                yield each.index, full, slice(done, done + len(full))
            else:
                for i, own in enumerate(each.first):
                    if own in full:
                        yield each.index, (own,), slice(done + i, done + i + 1)
            done += len(each.first)


def groups(every: Sequence[Batches]) -> Iterator[Sequence[Batches]]:
    """Yield groups of batches with at most AT_ONCE bytes of keys each."""
    some = max(1, AT_ONCE // every[0].nbytes())
    for at in range(0, len(every), some):
        yield every[at : at + some]


def formed(every: Sequence[Batches], count: int, group: BatchGroup | None = None) -> Generator[None, None, Units]:
    """Form `count` units of each batch, one piece at a time.

    All batches have equal numbers of tokens, and their indexes differ only in the layer.

    group: of these, if it is made already.
    """
    group = group or BatchGroup(every)
    made = yield from every[0].index.form(group, count)
    return group.units(*made)


def form(every: Sequence[Batches], count: int) -> None:
    """Make `count` units of each batch, and write them into the tables."""
    for some in groups(every):
        whole(formed(some, count)).write()


class Formation:
    """Units that are formed in pieces, a few with each of `steps` steps, from batches whose last tokens are still in the ring.

    Units are published atomically after the tokens leave the ring. Work is cancelled when the object is garbage-collected.
    """

    def __init__(self, every: Sequence[Batches], count: int, steps: int, aux: AuxStream) -> None:
        self._count, self._aux, self.made = count, aux, list[Units]()
        some, *others = groups(every)
        first = BatchGroup(some)  # memory of the current stream, which kept some from prompts; the other would ask for it
        self.groups = deque([formed(some, count, first), *(formed(other, count) for other in others)])
        index, own = every[0].index, weakref.ref(self)
        jobs = [partial(_advance, own)] * (len(self.groups) * index.pieces(count) - 1)
        used = [*first.tensors(), *(each.coming for each in every if each.coming is not None)]
        self.work = aux.spread(index.context.device, [*jobs, partial(_advance, own, last=True)], steps, *used)

    def advance(self, *, last: bool = False) -> None:
        """Do a piece, or all that are left. What fails is left to write(), which forms all units at once."""
        while self.groups:
            try:
                next(self.groups[0])
            except StopIteration as end:
                self.made.append(end.value)
                self.groups.popleft()
            except BaseException:
                self.groups.clear()
                self.made.clear()
                raise
            if not last:
                break

    def write(self, wanted: Sequence[tuple[FormingIndex, Sequence[Full]]]) -> None:
        """Write the units of some indexes' batches into their tables, on the current stream; the host does not wait."""
        self._aux.finish(self.work)
        if self.work.done is not None:
            here = torch.cuda.current_stream(self.work.device)
            here.wait_event(self.work.done)
            for units in self.made:
                for tensor in (units.digests, units.ends, units.places):
                    tensor.record_stream(here)
        for units in self.made:
            units.write(dict(wanted))
        if not self.made:
            form([Batches(index, full) for index, full in wanted], self._count)


def _advance(formation: weakref.ref[Formation], *, last: bool = False) -> None:
    if (of := formation()) is not None:
        of.advance(last=last)
