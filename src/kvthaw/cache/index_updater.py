"""Index updates of a layer: prompts, tokens that leave a full ring, and rebuilds; the state of each sequence in the index."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from kvthaw.cache.host import HostStore
from kvthaw.cache.index_api import RECENT_QUERIES, Index
from kvthaw.cache.layer_base import IndexState, RecentQueries
from kvthaw.cache.pool import Slab
from kvthaw.cache.retriever import Retriever
from kvthaw.cache.sequences import Sequences
from kvthaw.cache.step import Row
from kvthaw.cache.streams import Streams
from kvthaw.errors import CacheError
from kvthaw.kernels.freeze import Span


@dataclass(frozen=True, slots=True)
class Ready:
    """The index may be searched for the sequence."""


@dataclass(frozen=True, slots=True)
class Waiting(Ready):
    """commit() appends the tokens of the prompt step under way, up to `end`, with the prompt's last queries."""

    end: int
    queries: Tensor


@dataclass(frozen=True, slots=True)
class Stale:
    """The index has nothing of the sequence that may be searched. The sequence is indexed again before the next step."""


class SideIndex:
    """As Stale, while an index of this sequence alone is built on the host. The index that steps search then takes it over.

    Its changes run in order on a build thread, for which neither searches nor updates of other sequences wait. Each reads the
    rows that the store had when change() was called: the store may drop them meanwhile.

    end: the position up to which it is given tokens.
    index: an index whose states may be kept (`Traits.snapshots`), over a view of the store.
    make: makes the index over a store.
    group: number of the layer group, see Streams.build.
    """

    def __init__(self, make: Callable[[HostStore], Index], seq: int, store: HostStore, streams: Streams, group: int) -> None:
        self.end, self._wanted, self._view = 0, True, store.view()
        self.index, self._seq, self._store, self._streams, self._group = make(self._view), seq, store, streams, group
        self._changes: list[Future[None]] = []

    def change(self, end: int, change: Callable[..., None], *given: Any) -> None:
        """Queue a call of an index method for when the rows appended so far are in the store.

        end: where the index ends afterwards.
        """
        blocks, length = self._store.blocks(self._seq), self._store.length(self._seq)

        def run() -> None:
            try:
                if self._wanted:
                    self._view.hold(self._seq, blocks, length)
                    change(*given)
            finally:  # until now blocks are held, so that they are not freed
                self._view.hold(self._seq, (), 0)
                blocks.clear()

        self._changes.append(self._streams.build(self._store.arriving, run, self._group))
        self.end = end

    def wait(self, timeout: float | None) -> bool:
        """Wait for the changes. Returns whether all have ended.

        timeout: at most this many seconds; None: without limit.
        """
        return not wait(self._changes, timeout).not_done

    def export(self) -> Any:
        """Return the state of the index. Waits for its changes, and raises the error of any that failed."""
        for change in self._changes:
            change.result()
        return self.index.export(self._seq)

    def drop(self) -> None:
        """Cancel the queued changes. A running one ends by itself."""
        self._wanted = False
        for change in self._changes:
            change.cancel()


State = Ready | Stale | SideIndex
READY, STALE = Ready(), Stale()
Event = Literal["append", "build", "wait", "expire", "start", "take", "cancel", "truncate", "empty", "fail", "undo"]
TRANSITIONS: Mapping[Event, Mapping[type[State], type[State]]] = {
    "append": {Ready: Ready, Waiting: Ready},  # tokens from the watermark on
    "build": {Ready: Ready, Waiting: Ready, Stale: Ready},  # all tokens, or load them
    "wait": {Ready: Waiting, Waiting: Waiting},  # for commit()
    "expire": {Ready: Stale, Waiting: Stale, Stale: Stale},  # too little is indexed, or nothing
    "start": {Waiting: SideIndex, Stale: SideIndex, SideIndex: SideIndex},  # to build a SideIndex, or to change it
    "take": {SideIndex: Ready},  # it over
    "cancel": {SideIndex: Stale},
    "truncate": {Ready: Ready, Waiting: Ready, Stale: Stale},  # some positions stay
    "empty": {Ready: Ready, Waiting: Ready, Stale: Ready},  # none stay
    "fail": {Ready: Stale, Waiting: Stale, Stale: Stale},  # to build or to load
    "undo": {Waiting: Ready, Stale: Ready},  # what a step that failed had moved
}
"""Where each event leads from each state. A sequence is Waiting after its step only if commit() failed before it."""


@dataclass(slots=True)
class IndexedSequence:
    """A sequence in an index.

    first: the end of the sink, where the positions that are indexed begin.
    upto: the watermark, the position up to which the index has tokens, stale or not.
    last: where the latest append began; None: undo() cannot undo it.
    before: what a failed step returns the sequence to, Ready or Stale; None: this step has not moved it.
    """

    seq: int
    first: int
    upto: int
    state: State = READY
    last: int | None = None
    before: State | None = None

    def move(self, event: Event, to: State, *, in_step: bool = False) -> None:
        """Change the state. Raises CacheError if the event does not lead from one to the other.

        in_step: drop() undoes it, unless the sequence moves again outside of the step.
        """
        if TRANSITIONS[event].get(type(self.state)) is not type(to):
            names = f"{type(self.state).__name__} to {type(to).__name__}"
            raise CacheError(f"sequence {self.seq} of an index: {event!r} does not lead from {names}")
        self.before = (self.before or (READY if isinstance(self.state, Ready) else STALE)) if in_step else None
        self.state = to

    def cancel(self) -> None:
        """Cancel the SideIndex, if there is one. The sequence stays stale."""
        if isinstance(self.state, SideIndex):
            self.state.drop()
            self.move("cancel", STALE)

    def fail(self) -> None:
        """Record that the index may have any part of the sequence. A step that fails does not undo that."""
        self.cancel()
        self.move("fail", STALE)
        self.upto, self.last = self.first, None


_log = logging.getLogger(__name__)


class IndexUpdater:
    """Feed the index of a layer group with keys and values: from its anchor's prefills, its ring and its store.

    Positions below a sequence's watermark are not added twice. An index on the host reads keys from the store once they
    have arrived there. It is given only the number of tokens.

    recent_queries: of the anchor.
    """

    def __init__(
        self, retriever: Retriever, store: HostStore, slab: Slab, sequences: Sequences, recent_queries: RecentQueries
    ) -> None:
        self.retriever, self.store, self.slab = retriever, store, slab
        self.sequences, self.recent_queries = sequences, recent_queries
        self.first = slab.regions.sink
        self._of = [IndexedSequence(seq, self.first, self.first) for seq in range(store.seqs)]
        self._ends: dict[int, int] = {}  # where the rings begin of sequences whose prompts ended with the latest prefill

    def indexed(self, seq: int) -> int:
        """Return the watermark of a sequence: the position up to which the index has its tokens."""
        return self._of[seq].upto

    def is_stale(self, seq: int) -> bool:
        """Return whether a sequence must be indexed again before the next step."""
        return not isinstance(self._of[seq].state, Ready)

    @property
    def stale(self) -> set[int]:
        """Sequences that must be indexed again before the next step."""
        return {own.seq for own in self._of if not isinstance(own.state, Ready)}

    def takes_whole(self, seq: int) -> bool:
        """Return whether begin() builds a sequence from all rows of its prompt, while attention has them on the device."""
        traits = self.retriever.index.traits
        return self.is_stale(seq) and not traits.on_host and (traits.light or seq not in self.sequences.paused)

    def undisturbed(self, tokens: int) -> int:
        """Return how many of the next tokens come before tokens leave a ring and so change the index."""
        if self.stale:
            return 0
        changes = (any(self.indexed(seq) < stop for seq, _, stop in self.sequences.leaving(t)) for t in range(tokens))
        return next((t for t, changed in enumerate(changes) if changed), tokens)

    def predict(self, queries: Tensor) -> None:
        """Select with queries [B, Hq, T, D] for the next T tokens instead of their own. An index on the host begins at once."""
        on_host = self.retriever.index.traits.on_host
        self.retriever.predict(queries, self.undisturbed(queries.shape[2]) if on_host else 0)

    @property
    def builds_beside(self) -> bool:
        """Whether sequences can be built separately, in a SideIndex, and then swapped in."""
        traits = self.retriever.index.traits
        return traits.on_host and traits.snapshots

    def prompt(self, row: Row, keys: Tensor, values: Tensor, queries: Tensor, remaining: int) -> None:
        """Index a prompt up to its ring, starting from the watermark. The ring may hold some of the missing positions.

        keys, values: [H, n, D], of the new tokens, which are stored.
        queries: [Hq, W, D], the last ones.
        remaining: tokens of the same prompt that are still to come.

        A paused sequence is indexed with its last chunk, because no step may select from a part of it. An index on the host
        is then built concurrently with steps of other sequences; see begin() and take_built(). An index on the device that is
        not light is built between such steps. An index on the host cannot undo an append exactly, so commit() appends to it.

        Some indexes are better if built at once than if appended to. A sequence that a prompt in chunks makes much longer
        is then indexed again, once. This happens with the last chunk if the prompt was announced, else before the next step
        that selects.
        """
        index, own, past, new = self.retriever.index, self._of[row.seq], row.past, self.slab.regions.first_indexed(row.length)
        old, paused = own.upto, row.seq in self.sequences.paused
        if new <= old or self.is_stale(row.seq):
            return
        much = (old > self.first or remaining > 0) and 4 * (new - old + remaining) > old - self.first
        later = paused and remaining > 0
        if later and old > self.first and index.traits.on_host:
            return  # the last chunk gives it all that it lacks
        beside = paused and old == self.first and self.builds_beside
        if later or beside or (much and not index.traits.grows):
            own.move("expire", STALE, in_step=True)
            return
        if index.traits.on_host and old > self.first:
            own.move("wait", Waiting(new, queries), in_step=True)
            return
        begin = min(old, past)
        if old < past:
            ring = self.slab.read(row.seq, old, past)
            keys, values = torch.cat((ring[:, :, 0], keys), dim=1), torch.cat((ring[:, :, 1], values), dim=1)
        keys, values = (self.retriever.given(rows[:, old - begin : new - begin]) for rows in (keys, values))
        if old == self.first:
            self._build(row.seq, new, keys, values, queries)
        else:
            self._append([row.seq], keys[None], values[None], queries[None])

    def export(self, seq: int) -> IndexState | None:
        """Return the index's state of a sequence in host memory; None if it is stale. Raises CacheError if it cannot be."""
        if self.is_stale(seq):
            return None
        self.retriever.wait()
        return IndexState(self.retriever.index.export(seq), self.first, self.indexed(seq))

    def snapshot(self, seq: int) -> IndexState | None:
        """Return the state of a sequence to be kept with its rows; None for an index that is as fast to rebuild."""
        kept = self.retriever.index.traits.snapshots and self.indexed(seq) > self.first
        return self.export(seq) if kept else None

    def load(self, seq: int, start: int, state: IndexState | None) -> None:
        """Index an empty sequence, whose rows came without a prefill, up to position `start`.

        state: an index of the same tokens. With it, only the missing tokens are indexed, with the rest of the prompt.
            Without it, or if its tensors are invalid, which is logged, the index is built from scratch.
        """
        index, own, end = self.retriever.index, self._of[seq], 0 if state is None else min(start, state.end)
        fits = state is not None and state.first == self.first and 2 * end >= start and not end <= self.first < state.end
        if state is None or not fits or (isinstance(state.held, Mapping) and not index.traits.snapshots):
            if start > self.first:
                own.move("expire", STALE)
            return

        def load() -> None:
            try:
                index.load(seq, state.held, end)
            except CacheError as error:
                _log.warning("%s; it is rebuilt", error)
                rows = self._nothing(end - self.first)
                index.build(seq, self.first, rows, rows, self._queries(seq))

        own.move("build", READY)
        self.retriever.submit(self.store.arriving, load, own.fail)
        own.upto = end

    def commit(self) -> None:
        """Append the tokens of a prompt step to an index on the host, now that the step is committed. Then renew() prompts that
        ended with it.

        For a paused sequence, append concurrently with the steps of other sequences.
        """
        for own in self._of:
            own.before = None
        for seq, own in enumerate(self._of):
            if not isinstance(own.state, Waiting):
                continue
            new, queries = own.state.end, own.state.queries
            rows = self._nothing(new - own.upto)[None]
            given = [seq], rows, rows, queries[None]
            kept = self.snapshot(seq) if seq in self.sequences.paused and self.builds_beside else None
            if kept is None:
                self._append(*given)
            else:
                side = self._side(seq)
                side.change(kept.end, side.index.load, seq, kept.held, kept.end)
                side.change(new, side.index.append, *given)
        self.renew(self._ends)

    def begin(self, ends: Mapping[int, int], passed: Mapping[int, Tensor]) -> None:
        """Start to index stale sequences up to `ends`, where the rings begin of prompts that end with this step.

        Sequences in `passed` are indexed at once, from their rows [H, n, 2, D] on the device. Others are indexed on the
        host, concurrently with the step. Once the step is committed, renew() or take_built() swaps the result in.
        """
        self._ends = dict(ends)
        for seq, end in ends.items():
            if seq in passed and self.is_stale(seq):
                keys, values = passed[seq][:, self.first : end].unbind(2)
                self._build(seq, end, keys, values, self._queries(seq), in_step=True)
            elif self.builds_beside and self.is_stale(seq):
                side, rows = self._side(seq, in_step=True), self._nothing(end - self.first)
                side.change(end, side.index.build, seq, self.first, rows, rows, self._queries(seq))

    def drop(self) -> None:
        """Forget the tokens and the choices of a step that failed, and clear errors of the index."""
        self.retriever.recover()
        for seq, own in enumerate(self._of):
            before, own.before = own.before, None
            if before is not None:
                own.cancel()
            if before == STALE and not self.is_stale(seq):  # indexed with rows of the step
                self.begin_again(seq)
            elif before is not None and before != own.state:
                own.move("undo", before)
        self.retriever.forget_step()

    def flush(self, spans: Sequence[Span], rows: Tensor) -> None:
        """Index the tokens of `spans`, which leave their rings, unless they are indexed already.

        rows: [R, H, n, 2, D], the tokens' keys and values.
        """
        known = []
        for i, (seq, start, stop, _) in enumerate(spans):
            if self.indexed(seq) >= stop:
                continue
            if start > self.first:
                known.append(i)
            else:  # the first tokens of a sequence that had none to index
                own = self.retriever.given(rows[i])
                self._build(seq, stop, own[:, :, 0], own[:, :, 1], self._queries(seq))
        if known:
            rows = self.retriever.given(rows if len(known) == len(rows) else torch.stack([rows[i] for i in known]))
            self._append([spans[i][0] for i in known], rows[:, :, :, 0], rows[:, :, :, 1], None)

    def built(self, seq: int, timeout: float | None = 0.0) -> bool:
        """Return whether take_built() would not wait.

        timeout: wait at most this many seconds first; None: without limit.
        """
        side = self._of[seq].state
        return not isinstance(side, SideIndex) or side.wait(timeout)

    def take_built(self, seq: int) -> None:
        """Swap in the SideIndex that was built for a sequence. Non-blocking."""
        own, index, side = self._of[seq], self.retriever.index, self._of[seq].state
        if isinstance(side, SideIndex):
            own.move("take", READY)
            self.retriever.submit(self.store.arriving, lambda: index.load(seq, side.export(), side.end), own.fail)
            own.upto = side.end

    def renew(self, ends: Mapping[int, int]) -> None:
        """Rebuild sequences that are stale or not fully indexed, from the store and up to `ends`.

        Sequences that are being built are left alone, except that unpaused ones are swapped in. A sequence restored from a
        snapshot only gets its missing tokens appended. Paused sequences of an index on the device are left to a later call.
        """
        on_host = self.retriever.index.traits.on_host
        for seq, end in ends.items():
            own, paused, lacks = self._of[seq], seq in self.sequences.paused, end - self.indexed(seq)
            if isinstance(own.state, SideIndex):
                if not paused:
                    self.take_built(seq)
            elif self.is_stale(seq) and end <= self.first:  # a build failed, and the sequence was cropped
                self.truncate(seq, end)
            elif on_host and not self.is_stale(seq) and 0 < 4 * lacks < own.upto - self.first:
                rows = self._nothing(lacks)[None]
                self._append([seq], rows, rows, None)
            elif (self.is_stale(seq) or lacks > 0) and (on_host or not paused):
                self.rebuild(seq, end)

    def rebuild(self, seq: int, end: int) -> None:
        """Build the index of a sequence from the store, up to `end`. The host does not wait for a GPU."""
        keys, values = self.retriever.stored(seq, self.first, end).unbind(2)
        self._build(seq, end, keys, values, self._queries(seq))

    def rollback(self, seq: int, start: int) -> None:
        """Remove the positions >= start from the index, exactly if it can undo its latest append."""
        if self.indexed(seq) > start:
            self.retriever.recover()
            self.truncate(seq, start, exactly=self._of[seq].last == start > self.first)

    def truncate(self, seq: int, end: int, *, exactly: bool = False) -> None:
        """Remove positions >= end of a sequence from the index. A sequence without positions to index is not stale."""
        own = self._of[seq]
        own.cancel()
        self.retriever.truncate(seq, end if end > self.first else 0, exactly=exactly)
        own.upto, own.last = min(own.upto, max(end, self.first)), None
        own.move("truncate" if end > self.first else "empty", STALE if end > self.first and self.is_stale(seq) else READY)

    def begin_again(self, seq: int) -> None:
        """Drop the index's state of a sequence, and mark the sequence as stale."""
        self.truncate(seq, self.first)
        self._of[seq].move("expire", STALE)

    def branch(self) -> Callable[[], None]:
        """Apply updates to a copy of the index until rejoin(), which this returns. It drops the copy."""
        leave, sequences = self.retriever.branch(), [replace(own) for own in self._of]

        def rejoin() -> None:
            leave([own.upto for own in sequences])
            self._of = [replace(own) for own in sequences]

        return rejoin

    def clear(self, seq: int) -> None:
        """Remove a sequence from the index, and clear its errors."""
        self.retriever.recover()
        self.truncate(seq, 0)
        self._ends.pop(seq, None)

    def reorder(self, sequences: Sequence[int]) -> None:
        """Replace sequence i by the former sequence sequences[i]."""
        for own in self._of:
            own.cancel()
        self.retriever.reorder(sequences)
        self._of = [replace(self._of[old], seq=seq) for seq, old in enumerate(sequences)]

    def clone_from(self, other: IndexUpdater, *, pool: bool) -> None:
        """Copy the index of another updater; see Retriever.clone_from."""
        self.retriever.clone_from(other.retriever, pool=pool)
        self._of = [replace(own, state=STALE if other.is_stale(own.seq) else READY, before=None) for own in other._of]

    def trim_queries(self) -> None:
        """Free the early queries of indexed prompts, if the method kept all of them until then."""
        for seq, known in self.recent_queries.items() if self.recent_queries.most is None else ():
            indexed = self.indexed(seq) > self.first and seq not in self.sequences.idle
            if indexed and known.shape[1] > RECENT_QUERIES:
                self.recent_queries[seq] = known[:, -RECENT_QUERIES:].clone()

    def _side(self, seq: int, *, in_step: bool = False) -> SideIndex:
        """Mark a sequence as stale and return its SideIndex, which is built concurrently with the steps of other sequences."""
        own, group, side = self._of[seq], self.retriever, self._of[seq].state
        if not isinstance(side, SideIndex):
            side = SideIndex(group.fresh_index, seq, self.store, group.streams, group.group)
        own.move("start", side, in_step=in_step)
        return side

    def _build(self, seq: int, end: int, keys: Tensor, values: Tensor, queries: Tensor, *, in_step: bool = False) -> None:
        own = self._of[seq]
        own.move("build", READY, in_step=in_step)
        build = partial(self.retriever.index.build, seq, self.first, keys, values, queries)
        self.retriever.submit(self.store.arriving, build, own.fail)
        own.upto, own.last = end, None

    def _append(self, sequences: list[int], keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        starts, index = [(self._of[seq], self.indexed(seq)) for seq in sequences], self.retriever.index

        def failed() -> None:
            for own, start in starts:
                own.upto = end = min(own.upto, start)
                index.truncate(own.seq, end if end > self.first else 0)  # some may have their tokens already

        for own, _ in starts:
            own.move("append", READY)
        self.retriever.submit(self.store.arriving, partial(index.append, sequences, keys, values, queries), failed)
        for own, start in starts:
            own.upto, own.last = start + keys.shape[2], start

    def _nothing(self, rows: int) -> Tensor:
        """Return keys or values [H, n, 0] for an index on the host."""
        return self.slab.data.new_empty((self.slab.data.shape[1], rows, 0))

    def _queries(self, seq: int) -> Tensor:
        """Return the last queries of a sequence's prompt, [Hq, W, D]; W is 0 if it had no prompt."""
        none = self.slab.data.new_empty((self.retriever.context.q_heads, 0, self.retriever.context.head_dim))
        return self.recent_queries.get(seq, none)
