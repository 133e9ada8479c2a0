"""Index updates of a layer: prompts, tokens that leave a full ring, and rebuilds; the states of a sequence in an index."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvthaw.cache.host import HostStore
from kvthaw.cache.index_api import RECENT_QUERIES, Index
from kvthaw.cache.layer_base import RecentQueries
from kvthaw.cache.pool import Slab
from kvthaw.cache.retriever import Retriever
from kvthaw.cache.sequences import Sequences
from kvthaw.cache.state import IndexState
from kvthaw.cache.step import Row
from kvthaw.cache.streams import Streams
from kvthaw.errors import CacheError
from kvthaw.kernels.freeze import Span

_log = logging.getLogger(__name__)


class SideIndex:
    """An index on the host of one sequence of a layer, built until the index that steps search takes it over.

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


@dataclass(slots=True)
class IndexedSequence:
    """The state of a sequence in an index.

    upto: the watermark, the position up to which the index has tokens. None are if it is the end of the sink.
    stale: the index has nothing of it that may be searched. It is indexed again before the next step.
    last: where the latest append began; None: undo() cannot undo it.
    coming: the next watermark and the last queries of the prompt step under way. commit() appends its tokens.
    side: of a stale sequence, the index that is being built until take_built().
    before: whether it was stale before the step under way, if this step has changed it. drop() returns to that.
    """

    upto: int
    stale: bool = False
    last: int | None = None
    coming: tuple[int, Tensor] | None = None
    side: SideIndex | None = None
    before: bool | None = None

    def mark(self, stale: bool, *, in_step: bool = False) -> None:
        """Set whether the sequence is stale. Nothing is appended to it with the step.

        in_step: drop() undoes it.
        """
        self.before = self.stale if in_step and self.before is None else self.before
        self.stale, self.coming = stale, None

    def drop_side(self) -> None:
        """Cancel the SideIndex, if there is one. The sequence stays stale."""
        if self.side is not None:
            self.side.drop()
            self.side = None


@dataclass(frozen=True, slots=True)
class Indexed:
    """An index and the state of its updater; see IndexUpdater."""

    index: Index
    counts: Tensor
    sequences: list[IndexedSequence]


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
        self._of = [IndexedSequence(self.first) for _ in range(store.seqs)]
        self._ends: dict[int, int] = {}  # where the rings begin of sequences whose prompts ended with the latest prefill

    def indexed(self, seq: int) -> int:
        """Return the watermark of a sequence: the position up to which the index has its tokens."""
        return self._of[seq].upto

    def is_stale(self, seq: int) -> bool:
        """Return whether a sequence must be indexed again before the next step."""
        return self._of[seq].stale

    @property
    def stale(self) -> set[int]:
        """Sequences that must be indexed again before the next step."""
        return {seq for seq, own in enumerate(self._of) if own.stale}

    def takes_whole(self, seq: int) -> bool:
        """Return whether begin() builds a sequence on the device, from all rows of its prompt.

        The rows pass the device for attention, so they need not cross the bus again.
        """
        traits = self.retriever.index.traits
        return self.is_stale(seq) and not traits.on_host and (traits.light or seq not in self.sequences.paused)

    def undisturbed(self, tokens: int) -> int:
        """Return how many of the next tokens come before tokens leave a ring and so change the index."""
        if self.stale:
            return 0
        changes = (any(self.indexed(seq) < stop for seq, _, stop in self.sequences.leaving(t)) for t in range(tokens))
        return next((t for t, changed in enumerate(changes) if changed), tokens)

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
        not light is built between such steps.

        An index on the host cannot undo an append exactly, so commit() appends to it.

        Some indexes are better if built at once than if appended to. A sequence that a prompt in chunks makes much longer
        is then indexed again, once. This happens with the last chunk if the prompt was announced, else before the next step
        that selects.
        """
        index, own, past, new = self.retriever.index, self._of[row.seq], row.past, self.slab.regions.first_indexed(row.length)
        old, paused = own.upto, row.seq in self.sequences.paused
        if new <= old or own.stale:
            return
        much = (old > self.first or remaining > 0) and 4 * (new - old + remaining) > old - self.first
        later = paused and remaining > 0
        if later and old > self.first and index.traits.on_host:
            return  # the last chunk gives it all that it lacks
        beside = paused and old == self.first and self.builds_beside
        if later or beside or (much and not index.traits.grows):
            own.mark(True, in_step=True)
            return
        if index.traits.on_host and old > self.first:
            own.mark(False, in_step=True)
            own.coming = new, queries
            return
        begin = min(old, past)
        if old < past:
            ring = self.slab.read(row.seq, old, past)
            keys, values = torch.cat((ring[:, :, 0], keys), dim=1), torch.cat((ring[:, :, 1], values), dim=1)
        keys, values = (self._given(rows[:, old - begin : new - begin]) for rows in (keys, values))
        if old == self.first:
            self._build(row.seq, new, keys, values, queries)
        else:
            self._append([row.seq], keys[None], values[None], queries[None])

    def export(self, seq: int) -> IndexState | None:
        """Return the index's state of a sequence in host memory; None if the sequence is stale.

        Raises CacheError if the index cannot be exported.
        """
        if self.is_stale(seq):
            return None
        self.retriever.wait()
        return IndexState(self.retriever.index.export(seq), self.first, self.indexed(seq))

    def snapshot(self, seq: int) -> IndexState | None:
        """Return the state of a sequence to be kept with its rows; None for an index that is as fast to rebuild."""
        kept = self.retriever.index.traits.snapshots and self.indexed(seq) > self.first
        return self.export(seq) if kept else None

    def tensors(self, state: IndexState) -> Mapping[str, Tensor]:
        """Return a state of this index as tensors on the host."""
        return self.retriever.index.state(state.held)

    def load(self, seq: int, start: int, state: IndexState | None) -> None:
        """Index an empty sequence, whose rows came without a prefill, up to position `start`.

        state: an index of the same tokens. With it, only the missing tokens are indexed, with the rest of the prompt.
            Without it, or if its tensors are invalid, which is logged, the index is built from scratch.
        """
        index, own, end = self.retriever.index, self._of[seq], 0 if state is None else min(start, state.end)
        if (
            state is None
            or state.first != self.first
            or 2 * end < start
            or end <= self.first < state.end
            or (isinstance(state.held, Mapping) and not index.traits.snapshots)
        ):
            own.mark(start > self.first)
            return

        def load() -> None:
            try:
                index.load(seq, state.held, end)
            except CacheError as error:
                _log.warning("%s; it is rebuilt", error)
                rows = self._nothing(end - self.first)
                index.build(seq, self.first, rows, rows, self._no_queries())

        self.retriever.submit(self.store.arriving, load, partial(own.mark, True))
        own.upto = end

    def commit(self) -> None:
        """Append the tokens of a prompt step to an index on the host, now that the step is committed. Then renew() prompts that
        ended with it.

        For a paused sequence, append concurrently with the steps of other sequences.
        """
        for seq, own in enumerate(self._of):
            own.before = None
            if own.coming is None:
                continue
            new, queries = own.coming
            rows = self._nothing(new - own.upto)[None]
            given = [seq], rows, rows, queries[None]
            kept = self.snapshot(seq) if seq in self.sequences.paused and self.builds_beside else None
            if kept is None:
                own.mark(False)
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
            if not self.is_stale(seq):
                continue
            if seq in passed:
                keys, values = passed[seq][:, self.first : end].unbind(2)
                self._build(seq, end, keys, values, self._queries(seq), in_step=True)
            elif self.builds_beside:
                side, rows = self._side(seq, in_step=True), self._nothing(end - self.first)
                side.change(end, side.index.build, seq, self.first, rows, rows, self._queries(seq))

    def drop(self) -> None:
        """Forget the tokens and the choices of a step that failed, and clear errors of the index."""
        self.retriever.recover()
        for seq, own in enumerate(self._of):
            before, own.before = own.before, None
            if before is None:
                continue
            own.drop_side()
            if not before:
                own.mark(False)
            elif not own.stale:  # indexed with rows of the step
                self.begin_again(seq)
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
                continue
            # These are the first tokens of a sequence that had none to index.
            own = self._given(rows[i])
            self._build(seq, stop, own[:, :, 0], own[:, :, 1], self._queries(seq))
        if known:
            rows = self._given(rows if len(known) == len(rows) else torch.stack([rows[i] for i in known]))
            self._append([spans[i][0] for i in known], rows[:, :, :, 0], rows[:, :, :, 1], None)

    def built(self, seq: int, timeout: float | None = 0.0) -> bool:
        """Return whether take_built() would not wait.

        timeout: wait at most this many seconds first; None: without limit.
        """
        side = self._of[seq].side
        return side is None or side.wait(timeout)

    def take_built(self, seq: int) -> None:
        """Swap in the SideIndex that was built for a sequence. Non-blocking."""
        own, index = self._of[seq], self.retriever.index
        side, own.side = own.side, None
        if side is not None:
            own.mark(False)
            self.retriever.submit(
                self.store.arriving, lambda: index.load(seq, side.export(), side.end), partial(own.mark, True)
            )
            own.upto = side.end

    def renew(self, ends: Mapping[int, int]) -> None:
        """Rebuild sequences that are stale or not fully indexed, from the store and up to `ends`.

        Sequences that are being built are left alone, except that unpaused ones are swapped in. A sequence restored from a
        snapshot only gets its missing tokens appended. Paused sequences of an index on the device are left to a later call.
        """
        for seq, end in ends.items():
            old, stale, paused = self.indexed(seq), self.is_stale(seq), seq in self.sequences.paused
            if self._of[seq].side is not None:
                if not paused:
                    self.take_built(seq)
                continue
            if (not stale and old >= end) or (paused and not self.retriever.index.traits.on_host):
                continue
            if not stale and self.retriever.index.traits.on_host and 4 * (end - old) < old - self.first:
                rows = self._nothing(end - old)[None]
                self._append([seq], rows, rows, None)
                continue
            self.rebuild(seq, end)

    def rebuild(self, seq: int, end: int) -> None:
        """Build the index of a sequence from the store, up to `end`. The host does not wait for a GPU."""
        data, tokens = self.slab.data, end - self.first
        if self.retriever.index.traits.on_host:
            keys = values = self._nothing(tokens)
        elif data.is_cuda:
            rows = data.new_empty((data.shape[1], tokens, *data.shape[3:]))
            self.retriever.streams.prefetcher.read(self.store, seq, self.first, rows)
            keys, values = rows.unbind(2)
        else:
            keys, values = self.store.read(seq, self.first, end).unbind(2)
        self._build(seq, end, keys, values, self._queries(seq))

    def rollback(self, seq: int, start: int) -> None:
        """Remove the positions >= start from the index, exactly if it can undo its latest append."""
        own = self._of[seq]
        if own.upto <= start:
            return
        self.retriever.recover()
        if own.last == start > self.first:
            self.retriever.truncate(seq, start, exactly=True)
            own.upto = start
        else:
            self.truncate(seq, start)

    def truncate(self, seq: int, end: int) -> None:
        """Remove positions >= end of a sequence from the index. A sequence without positions to index is not stale."""
        own = self._of[seq]
        own.drop_side()
        self.retriever.truncate(seq, end if end > self.first else 0)
        own.upto, own.last = min(own.upto, max(end, self.first)), None
        if end <= self.first or own.coming is not None:
            own.mark(False)

    def begin_again(self, seq: int) -> None:
        """Drop the index's state of a sequence, and mark the sequence as stale."""
        self.truncate(seq, self.first)
        self._of[seq].mark(True)

    def branch(self) -> Indexed:
        """Apply updates to a copy of the index until rejoin()."""
        return Indexed(*self.retriever.branch(), [replace(own) for own in self._of])

    def rejoin(self, before: Indexed) -> None:
        """Return to the index before branch(), and drop the copy."""
        self.retriever.rejoin(before.index, before.counts, [own.upto for own in before.sequences])
        self._of = [replace(own) for own in before.sequences]

    def clear(self, seq: int) -> None:
        """Remove a sequence from the index, and clear its errors."""
        self.retriever.recover()
        self.truncate(seq, 0)
        self._of[seq] = IndexedSequence(self.first)
        self._ends.pop(seq, None)

    def reorder(self, sequences: Sequence[int]) -> None:
        """Replace sequence i by the former sequence sequences[i]."""
        for own in self._of:
            own.drop_side()
        self.retriever.reorder(sequences)
        self._of = [replace(self._of[seq]) for seq in sequences]

    def clone_from(self, other: IndexUpdater) -> None:
        """Copy the index of another updater with an equal number of sequences."""
        other.retriever.wait()
        self.retriever.index.clone_from(other.retriever.index)
        self._of = [IndexedSequence(own.upto, own.stale) for own in other._of]

    def trim_queries(self) -> None:
        """Free the early queries of indexed prompts, if the method kept all of them until then."""
        for seq, known in self.recent_queries.items() if self.recent_queries.most is None else ():
            indexed = self.indexed(seq) > self.first and seq not in self.sequences.idle
            if indexed and known.shape[1] > RECENT_QUERIES:
                self.recent_queries[seq] = known[:, -RECENT_QUERIES:].clone()

    def _side(self, seq: int, *, in_step: bool = False) -> SideIndex:
        """Mark a sequence as stale and return its SideIndex, which is built concurrently with the steps of other sequences."""
        own, group = self._of[seq], self.retriever
        own.mark(True, in_step=in_step)
        own.side = own.side or SideIndex(group.fresh_index, seq, self.store, group.streams, group.group)
        return own.side

    def _build(self, seq: int, end: int, keys: Tensor, values: Tensor, queries: Tensor, *, in_step: bool = False) -> None:
        own = self._of[seq]

        def failed() -> None:
            own.upto = self.first
            own.mark(True)

        own.mark(False, in_step=in_step)
        self.retriever.submit(
            self.store.arriving, partial(self.retriever.index.build, seq, self.first, keys, values, queries), failed
        )
        own.upto, own.last = end, None

    def _append(self, sequences: list[int], keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        starts, index = [(seq, self._of[seq], self.indexed(seq)) for seq in sequences], self.retriever.index

        def failed() -> None:
            for seq, own, start in starts:
                own.upto = end = min(own.upto, start)
                index.truncate(seq, end if end > self.first else 0)  # some of the sequences may have their tokens already

        self.retriever.submit(self.store.arriving, partial(index.append, sequences, keys, values, queries), failed)
        for _, own, start in starts:
            own.upto, own.last = start + keys.shape[2], start

    def _given(self, rows: Tensor) -> Tensor:
        """Return rows [..., D] as the index takes them: without channels if it works on the host, where it reads the store."""
        return rows.new_empty((*rows.shape[:-1], 0)) if self.retriever.index.traits.on_host else rows

    def _nothing(self, rows: int) -> Tensor:
        """Return keys or values [H, n, 0] for an index on the host."""
        return self.slab.data.new_empty((self.slab.data.shape[1], rows, 0))

    def _queries(self, seq: int) -> Tensor:
        """Return the last queries of a sequence's prompt, [Hq, W, D]; W is 0 if it had no prompt."""
        known = self.recent_queries.get(seq)
        return self._no_queries() if known is None else known

    def _no_queries(self) -> Tensor:
        context = self.retriever.context
        return self.slab.data.new_empty((context.q_heads, 0, context.head_dim))
