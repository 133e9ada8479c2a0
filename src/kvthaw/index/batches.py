"""Units that batches of tokens form among themselves, as clusters and tree nodes do: at once, or in pieces during the steps before
they are needed."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor

from kvthaw.cache.index_api import IndexContext
from kvthaw.cache.streams import AuxStream
from kvthaw.index.draws import stream
from kvthaw.index.tables import Full, Target
from kvthaw.index.units import Seq, UnitIndex
from kvthaw.kernels.kmeans import whole
from kvthaw.kernels.unit_select import Policy

AT_ONCE = 1 << 28
"""Limit on the bytes of keys that are clustered at once, but at least one layer: many sequences would need much memory."""

Formed = tuple[Tensor, Tensor, Tensor]
"""Units of M batches of H heads: digests [M H, C, E], order [M H, T] of a batch's tokens, stops [M H, C + 1].

Unit c is stops[c] : stops[c + 1] of the order.
"""
_SHORT = 1 << 23
"""Bytes of a layer's keys up to which a prompt waits for the prompts of other layers, to be formed with them.

Few keys do not keep a GPU busy, and their launches take the host longer than the model's own.
"""


class BatchedIndex(UnitIndex):
    """An index that forms units from batches of tokens: `per_batch` units of each batch, `count` units of a prompt.

    A batch waits for the batches of other layers at the same step, and all are formed at once. So are short prompts. If the
    last tokens of a batch are known before they leave the ring, its units are formed during the steps until then. They
    enter the tables when they would have been formed otherwise.

    begun: batches whose units are being formed ahead.
    """

    mapped = True

    def __init__(self, context: IndexContext, *, batch: int, per_batch: int, width: int, policy: Policy) -> None:
        self.per_batch = per_batch
        self.begun: dict[Full, Formation] = {}
        super().__init__(context, size=batch // per_batch, batch=batch, width=width, policy=policy)

    def make_room(self, seqs: int, tokens: int) -> None:
        super().make_room(seqs, tokens)
        if self.context.device.type == "cuda" and tokens >= self.batch and not any(seq.tokens for seq in self.seqs):
            self._deferred.once((self.kind(), "load"), self._load)

    def _load(self) -> None:
        """Load the CUDA kernels that form a batch before there are tokens, since loading takes about 40 ms of the first full
        batch's step."""
        none = Batches(self, [Full(seq, 0, 0) for seq in range(len(self.seqs))])
        form([none, none], self.per_batch)
        self.beside(partial(whole, formed([none, none], self.per_batch)))  # which keeps memory
        self.join()

    @property
    def settings(self) -> Hashable:
        """What units depend on besides keys, positions and heads."""
        raise NotImplementedError

    def form(self, group: BatchGroup, count: int) -> Generator[None, None, Formed]:
        """Make `count` units of each batch of a group, in pieces."""
        raise NotImplementedError

    def pieces(self, count: int) -> int:
        """Return about how many pieces form() splits `count` units into."""
        return 1

    def kind(self) -> Hashable:
        """See UnitIndex. Indexes of a kind also form their batches at once."""
        context = self.context
        return type(self), context.kv_heads, context.head_dim, context.dtype, context.device, context.seed, self.settings

    def form_now(self, first: Sequence[Full], keys: Tensor, count: int) -> None:
        """Form `count` units of each batch at once.

        first: the first batch of each sequence.
        keys: [R, H, n, T, D], of n batches of R sequences.
        """
        form([Batches(self, first, keys)], count)

    def build_prompt(self, seq: int, first: int, keys: Tensor, count: int) -> None:
        """Start a sequence with a prompt, keys [H, T, D], and form `count` units of it.

        A short prompt is formed with the prompts of other layers, a long one on the side stream.
        """
        tokens, given = keys.shape[1], Batches(self, (Full(seq, 0, 0),), keys[None, :, None])
        if not 0 < keys.nbytes <= _SHORT:
            self.build_beside(seq, first, tokens, count, partial(form, [given], count), keys)
            return
        self.clear(seq, first)
        self.reserve(0, count + 1, tokens)
        self.defer((self.kind(), "prompt", tokens, count), partial(form, count=count), given, [seq])
        self._set(seq, Seq(tokens, count, 0, [(0, 0), (tokens, count)]))

    def build_beside(self, seq: int, first: int, tokens: int, count: int, job: Callable[[], None], *used: Tensor) -> None:
        """Start a sequence with a prompt of `tokens` tokens. `job` forms its `count` units on the side stream, as one batch.

        used: tensors that the job reads and others own.
        """
        self.clear(seq, first)
        if tokens:
            self.reserve(0, count + 1, tokens)
            self.beside(job, *used)
            self._set(seq, Seq(tokens, count, 0, [(0, 0), (tokens, count)]))

    def close(self, full: Sequence[Full], keys: Tensor | None) -> None:
        begun: dict[Formation | None, list[Full]] = {}
        for own in full:
            begun.setdefault(self.begun.pop(own, None), []).append(own)
        if keys is not None:
            self.form_now(full, keys, self.per_batch)
            return
        for formation, some in begun.items():
            of, seqs = tuple(some), [own.seq for own in some]
            if formation is None:
                self.defer((self.kind(), "form", of), partial(form, count=self.per_batch), Batches(self, of), seqs)
            else:
                self.defer((formation, of), formation.write, (self, of), seqs)

    # Ahead of time

    def upcoming(self, seq: int) -> int:
        host = self.seqs[seq]
        open_batch = 0 < host.kept < self.batch and not any(own.seq == seq for own in self.begun)
        return self.batch - host.kept if open_batch else 0

    def work_ahead(self, seqs: Sequence[int], keys: Tensor) -> None:
        buffer, full = self.context.regions.buffer, tuple(Full(seq, *self.seqs[seq].marks[-1]) for seq in seqs)
        steps = -(-keys.shape[2] // buffer) * buffer
        work = partial(begin, count=self.per_batch, steps=steps)
        self.defer((self.kind(), "begin", full, steps), work, Batches(self, full, coming=keys), seqs)

    def truncate(self, seq: int, length: int) -> None:
        shorter = seq < len(self.seqs) and length - self.first < self.seqs[seq].tokens
        super().truncate(seq, length)
        if shorter:
            self._drop_begun(seq)

    def undo(self, seq: int, length: int) -> None:
        super().undo(seq, length)
        self._drop_begun(seq)

    def reorder(self, seqs: Sequence[int]) -> None:
        super().reorder(seqs)
        self.begun.clear()

    def clone_from(self, other: Self) -> None:
        super().clone_from(other)
        self.begun.clear()

    def _drop_begun(self, seq: int) -> None:
        self.begun = {own: formation for own, formation in self.begun.items() if own.seq != seq}


@dataclass(frozen=True, slots=True)
class Batches:
    """Batches of tokens of an index's sequences; each batch forms units of its own tokens.

    first: the first batch of each sequence.

    given: keys [R, H, n, T, D], n batches of each sequence. None: one batch each, whose keys the index has.
    coming: [R, H, m, D], the last keys of a batch that the index does not have yet.
    """

    index: BatchedIndex
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

    def write(self, wanted: Mapping[BatchedIndex, Sequence[Full]] | None = None) -> None:
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
        self, wanted: Mapping[BatchedIndex, Sequence[Full]] | None
    ) -> Iterator[tuple[BatchedIndex, tuple[Full, ...], slice]]:
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

    def write(self, wanted: Sequence[tuple[BatchedIndex, Sequence[Full]]]) -> None:
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


def begin(every: Sequence[Batches], count: int, steps: int) -> None:
    """Start to form the units of batches whose last tokens are still in the ring."""
    formation = Formation(every, count, steps, every[0].index._side)
    for each in every:
        each.index.begun.update(dict.fromkeys(each.first, formation))
