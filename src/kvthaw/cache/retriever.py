"""Retrieval of a layer group: an anchor layer that selects rows, and the layers that follow its choices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvthaw.cache.choice import Choice, HostSelectionBuffer, check_selection
from kvthaw.cache.host import HostStore
from kvthaw.cache.index_api import Index, IndexContext, Method, Selection
from kvthaw.cache.pool import Residency
from kvthaw.cache.sequences import Sequences
from kvthaw.cache.step import Step
from kvthaw.cache.streams import SegmentedGraph, Streams
from kvthaw.errors import CacheError, KvthawError
from kvthaw.kernels.gpu import capturing, to_host

_CHECKED = 3
"""How many of the first choices of tested indexes are checked. Choices of other indexes are checked in all eager steps."""


class Retriever:
    """Index, residency and latest choices of a layer group. The index works on the device.

    The anchor makes one choice per token. Followers use the same choices in the same order and fetch their own rows.

    reads_blocks: attention reads rows in blocks on the device, so these rows get no slot in the pool.
    predicted: queries [B, Hq, T, D] by which the next T tokens select, instead of their own; None: there are none.
    searches: running, for the first of these tokens. The index changes before the others, which are searched when they come.
    """

    def __init__(
        self, method: Method, index: Index, context: IndexContext, sequences: Sequences, seqs: int, streams: Streams
    ) -> None:
        self.method, self.index, self.context, self.sequences, self.rows = method, index, context, sequences, context.rows
        where = torch.device("cpu") if index.traits.on_host else context.device
        self.residency = Residency(seqs, context.kv_heads, method.slots(self.rows), device=where)
        self.reads_blocks = False
        self.choices: list[Choice] = []
        self.predicted: Tensor | None = None
        self.searches: list[Future[Selection]] = []
        self.asked_again = 0  # queries of layers that share the anchor's keys
        self.streams, self.group = streams, next(streams.groups)
        self._unchecked = _CHECKED if self.index.tested else None  # None: check always
        self._asked_by: Step | None = None  # the last eager step that queried the index
        self._asks = 0  # its queries
        self._counted, self._again = torch.empty_like(self.residency.counts), 0  # counts and asked_again before it

    def submit(self, after: torch.cuda.Event | None, job: Callable[[], None], failed: Callable[[], None]) -> None:
        """Run a job that updates the index. Its reads of the store wait for rows in transfer, see HostStore.read_keys.

        after: event that ends the transfer of the rows.
        failed: called if the job raises.
        """
        try:
            job()
        except BaseException:
            failed()
            raise

    def wait(self) -> None:
        """Wait for all index updates and searches, and run the work that the index has queued.

        Raises the error of an update at every call until recover(): an index that lacks tokens must not be searched.
        """
        self.index.join()  # as a replayed step does not

    def recover(self) -> None:
        """Clear the error of an update, which is then repeated. Waits for running jobs."""

    def given(self, rows: Tensor) -> Tensor:
        """Return rows [..., D] as the index takes them."""
        return rows

    def stored(self, seq: int, start: int, stop: int) -> Tensor:
        """Return stored rows [H, n, 2, D] as the index takes them. The host does not wait for a GPU."""
        context = self.context
        if context.device.type != "cuda":
            return context.store.read(seq, start, stop)
        shape = context.kv_heads, stop - start, 2, context.head_dim
        rows = torch.empty(shape, dtype=context.dtype, device=context.device)
        self.streams.prefetcher.read(context.store, seq, start, rows)
        return rows

    def forget_step(self) -> None:
        """Forget the choices of a failed step, which may have assigned slots without filling them and queried the index."""
        self.residency.clear(slice(None))
        if self._asked_by is not None and self._asked_by is self.sequences.step:
            for _ in range(self._asks):
                self.index.unask()
            self.residency.counts.copy_(self._counted)
            self.asked_again = self._again
        self._asked_by = None

    def widen(self, rows: int) -> None:
        """Select `rows` rows from now on, which is more than before."""
        self.wait()
        self.rows = rows
        self.residency.widen(self.method.slots(rows))

    def make_room(self, tokens: int) -> None:
        """Allocate for `tokens` tokens of each sequence. Until there are more, no tensor of a choice moves."""
        self.index.make_room(self.residency.slot_row.shape[0], tokens)
        self.residency.grow(tokens)

    @property
    def recalled(self) -> Tensor:
        """The most recently selected rows, [B, H, C] int32, -1 padded."""
        return self.residency.latest if self.reads_blocks else self.residency.slot_row[:, :, :-1]

    @property
    def in_place(self) -> bool:
        """Whether no row is fetched to the pool, because every block lies on the device."""
        return self.reads_blocks and not self.streams.device.spills

    def predict(self, queries: Tensor, searched: int) -> None:
        """Set `predicted`. An index on the host begins to search for the first `searched` tokens."""
        self.drop_predicted()
        self.predicted = queries

    def drop_predicted(self) -> None:
        """Drop what was predicted. Cancels the searches that have not started, and waits for the one that reads the index."""
        for search in self.searches:
            search.cancel()
        wait(self.searches)
        self.predicted, self.searches = None, []

    def choose(self, query: Tensor, length: int, t: int = 0) -> Choice:
        """Select rows for one query per head of token t, and assign slots. The last of the predicted queries is then spent.

        query: its own, [B, Hq, D].
        length: length of the longest sequence.
        """
        predicted, search = self.predicted, self.searches[t] if t < len(self.searches) else None
        if predicted is not None:
            query = predicted[:, :, t]
        with self._asking(query.device), self._naming_errors():
            selection = self._select(query) if search is None else search.result()
        self._check(selection, query)
        if selection.estimated is not None:  # a choice is kept until the next step
            selection = replace(selection, estimated=None)
        choice = Choice(selection)
        if not self.in_place:
            self._evict_all(query.shape[0])
            choice = self._admit(selection, query, length)
        self.choices.append(choice)
        if predicted is not None and t == predicted.shape[2] - 1:
            self.drop_predicted()
        return choice

    def _select(self, query: Tensor) -> Selection:
        return self.index.select(query, self.rows)

    def _admit(self, selection: Selection, query: Tensor, length: int) -> Choice:
        store = self.context.store
        self.residency.grow(length)
        blocks = (store.table.on_host, store.block_size) if self.reads_blocks else None
        return Choice(selection, *self.residency.admit(selection.rows, blocks=blocks))

    @contextmanager
    def _asking(self, device: torch.device) -> Iterator[None]:
        """Keep what was counted before a step's first query of the index, and count its queries; forget_step() undoes them.

        A layer that shares the keys may ask once the step is committed. Does nothing while a step is captured, since a captured
        select() does not run yet.
        """
        step = None if capturing(device) else self.sequences.step or self.sequences.latest
        asks = self._asks + 1 if step is self._asked_by else 1
        if asks == 1 and step is not None:
            self._counted.copy_(self.residency.counts)
            self._again = self.asked_again
        yield
        self._asked_by, self._asks = step, asks

    @contextmanager
    def _naming_errors(self) -> Iterator[None]:
        """Convert an index's ValueError, such as for a query that is not finite, into a CacheError."""
        try:
            yield
        except KvthawError:
            raise
        except ValueError as error:
            raise CacheError(f"layer {self.context.layer}: {error}") from error

    def _check(self, selection: Selection, query: Tensor) -> None:
        """Check the index's selection: at first for tested indexes, always for others, never while a step is captured."""
        if self._unchecked == 0 or capturing(query.device):
            return
        who, ends = f"{type(self.index).__name__} of {self.method.name}", self.sequences.on_device.starts[: len(query)]
        check_selection(selection, who, self.context, query.shape[0], self.rows, ends)
        if self._unchecked is not None:
            self._unchecked -= 1

    def _evict_all(self, seqs: int) -> None:
        """Empty all slots if the method keeps no rows between steps."""
        if self.method.keep == 0:
            self.residency.clear(slice(seqs))

    def truncate(self, seq: int, length: int, *, exactly: bool = False) -> None:
        """Remove positions >= length of a sequence.

        exactly: they were appended last, which an index may undo exactly.
        """
        self.wait()
        (self.index.undo if exactly else self.index.truncate)(seq, length)
        if not self.in_place:  # else no row was ever admitted
            self.residency.clear(seq, length)

    def branch(self) -> Callable[[Sequence[int]], None]:
        """Replace the index by a copy. Returns a function of the watermarks of all sequences, which undoes that."""
        self.wait()
        before, self.index, counts = self.index, self.fresh_index(), self.residency.counts.clone()
        self.index.clone_from(before)

        def rejoin(lengths: Sequence[int]) -> None:
            self.recover()
            self.wait()
            self.index, self._asked_by = before, None
            self.residency.counts.copy_(counts)
            for seq, length in enumerate(lengths):
                self.residency.clear(seq, length)

        return rejoin

    def clone_from(self, other: Retriever, *, pool: bool) -> None:
        """Copy the index of another retriever with an equal number of sequences.

        pool: copy which rows are in the pool, and the counts, too. The pools must have equal sizes.
        """
        other.wait()
        self.index.clone_from(other.index)
        if pool:
            self.residency, self.asked_again = copy.deepcopy(other.residency), other.asked_again
        self.make_room(self.sequences.capacity)

    def fresh_index(self, store: HostStore | None = None) -> Index:
        """Return an empty index of this group.

        store: which it reads, if not the layer's.
        """
        return self.method.make_index(self.context if store is None else replace(self.context, store=store))

    def reorder(self, seqs: Sequence[int]) -> None:
        """Replace sequence i by the former sequence seqs[i]."""
        self.wait()
        self.index.reorder(seqs)
        self.residency.reorder(torch.tensor(seqs, device=self.residency.device))

    def tensors(self) -> list[Tensor]:
        """Return the tensors that a choice reads and writes at fixed addresses."""
        return [*([] if self.in_place else self.residency.tensors()), self.residency.counts, *self.index.tensors()]


class HostRetriever(Retriever):
    """A retriever whose index works on the host, on threads of its own. On a GPU it gets queries and sends choices."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._buffers: dict[int, HostSelectionBuffer] = {}
        self._jobs: list[tuple[Future[None], Callable[[], None]]] = []
        self._searching: Future[Selection] | None = None  # the last that began
        self._failure: BaseException | None = None  # of a job

    def buffer(self, seqs: int) -> HostSelectionBuffer:
        """Return the buffer for choices of `seqs` sequences. It keeps its address."""
        if seqs not in self._buffers:
            self._buffers[seqs] = HostSelectionBuffer(self.context, seqs, self.rows, self.residency.slots)
        return self._buffers[seqs]

    def submit(self, after: torch.cuda.Event | None, job: Callable[[], None], failed: Callable[[], None]) -> None:
        """Run a job on the worker thread after an event. wait() calls failed() if it raised."""
        try:
            self._wait_for_search()
            self._jobs.append((self.streams.submit(after, job, self.group), failed))
        except BaseException:
            failed()
            raise

    def wait(self) -> None:
        self._wait_for_updates()
        super().wait()

    def _wait_for_updates(self) -> None:
        self._wait_for_search()
        jobs, self._jobs = self._jobs, []
        for job, failed in reversed(jobs):  # reversed, so that the first that failed decides
            error = job.exception()
            if error is not None:
                self._failure = error
                failed()
        if isinstance(self._failure, ValueError):
            raise CacheError(f"layer {self.context.layer}: {self._failure}") from self._failure
        if self._failure is not None:
            raise self._failure

    def _wait_for_search(self) -> None:
        if self._searching is not None:
            wait([self._searching])
            self._searching = None

    def recover(self) -> None:
        if self._jobs or self._failure is not None:
            with suppress(Exception):
                self.wait()
            self._failure = None

    def given(self, rows: Tensor) -> Tensor:
        """Return rows without channels: the index reads the store."""
        return rows.new_empty((*rows.shape[:-1], 0))

    def stored(self, seq: int, start: int, stop: int) -> Tensor:
        context = self.context
        return torch.empty((context.kv_heads, stop - start, 2, 0), dtype=context.dtype, device=context.device)

    def widen(self, rows: int) -> None:
        super().widen(rows)
        self._buffers.clear()

    def predict(self, queries: Tensor, searched: int) -> None:
        super().predict(queries, searched)
        self.searches = self.search(queries[:, :, :searched]) if searched else []

    def search(self, queries: Tensor) -> list[Future[Selection]]:
        """Start selecting rows for queries [B, Hq, T, D], T > 0, once they are on the host. Returns a future for each token."""
        here, sent = to_host(queries)
        changes, select = [job for job, _ in self._jobs], torch.no_grad()(super()._select)  # which holds for one thread
        found = [self.streams.search(sent, changes, partial(select, query)) for query in here.unbind(2)]
        self._searching = found[-1]
        return found

    def choose(self, query: Tensor, length: int, t: int = 0) -> Choice:
        """Choose as Retriever does. While a step is captured, the choice is recorded instead; every replay makes it."""
        if self.streams.graph is None:
            self._wait_for_updates()  # select() runs what is queued
            return super().choose(query, length, t)
        choice = self._recorded(query, self.streams.graph)
        self.choices.append(choice)
        return choice

    def _select(self, query: Tensor) -> Selection:
        query, sent = to_host(query)
        if sent is not None:
            sent.synchronize()
        return super()._select(query)

    def _admit(self, selection: Selection, query: Tensor, length: int) -> Choice:
        """Assign slots, and copy them to the query's device in one copy."""
        if not query.is_cuda:
            return super()._admit(selection, query, length)
        self.residency.grow(length)
        buffer = self.buffer(len(query))
        here = torch.empty_like(buffer.answer, pin_memory=True)  # a new buffer, since the last one may still be in transfer
        _, _, *placed = buffer.parts(here)
        slots, fetch, _ = self.residency.admit(selection.rows, (placed[0], placed[1], placed[2]))
        return Choice(selection, *buffer.parts(here.to(query.device, non_blocking=True))[2:], (slots, fetch))

    def _recorded(self, query: Tensor, graph: SegmentedGraph) -> Choice:
        """Record a choice on the host: a graph writes the query to a pinned buffer, the next reads the choice from another."""
        seqs = query.shape[0]
        selection_buffer = self.buffer(seqs)
        here = selection_buffer.parts(selection_buffer.answer)
        selection_buffer.query.copy_(query, non_blocking=True)
        admit = self.residency.admission(here[0], here[2:])
        asked, select = self.index, self.index.prepare(selection_buffer.query, self.rows, *here[:2])

        def choose() -> None:
            nonlocal asked, select
            self.wait()
            if self.index is not asked:  # branch()
                asked, select = self.index, self.index.prepare(selection_buffer.query, self.rows, *here[:2])
            with self._naming_errors():
                select()
            self._evict_all(seqs)
            admit()

        graph.host(choose)
        rows, counts, slots, fetch, live = selection_buffer.parts(selection_buffer.answer.to(query.device, non_blocking=True))
        return Choice(Selection(rows, counts), slots, fetch, live)
