"""Streams and threads for offloading, indexing and searching concurrently with the device (IceCache, figure 5b).

While the device computes the next layers, a copy stream offloads a finished layer's keys and values. Two threads index them
once they have arrived, one for even and one for odd layer groups. One thread searches with predicted queries. Two build
indexes of prompts and of sequences that join. One pins memory for coming tokens. Index work is queued for one kernel, or
runs on a side stream: thirty layers in one kernel take little longer than one.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvthaw.cache.device_memory import DeviceMemory
from kvthaw.cache.host import HostStore
from kvthaw.cache.host_memory import HostMemory
from kvthaw.cache.kv_prefetcher import KVPrefetcher
from kvthaw.kernels.gpu import capturing, uncached_casts, upload

_Made = TypeVar("_Made")
_KEPT = 8


class DeferredBatch:
    """Work that layers queue until one of them needs its result, and small tables that all of them need.

    An owner calls flush() before it reads or writes the targets of its queued work.

    owners: the owners of queued work, with the kind that each queued last.
    lost: sequences whose work was dropped, because it or earlier work failed.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, tuple[Callable[[Sequence[Any]], None], list[Any], set[int]]] = {}
        self.owners: dict[object, Hashable] = {}
        self._made: dict[Hashable, Any] = {}
        self.lost: set[int] = set()

    def defer(
        self, owner: object, kind: Hashable, work: Callable[[Sequence[Any]], None], item: Any, seqs: Iterable[int] = ()
    ) -> None:
        """Queue an item of `seqs`. work(items) runs once for all items of a kind, later than the owner's earlier work."""
        kinds = list(self._waiting)
        if kind in kinds and owner in self.owners and kinds.index(self.owners[owner]) > kinds.index(kind):
            self.flush()
        _, items, of = self._waiting.setdefault(kind, (work, [], set()))
        items.append(item)
        of.update(seqs)
        self.owners[owner] = kind

    def flush(self) -> None:
        """Run all queued work, kinds in their order of arrival. If one fails, the rest is dropped."""
        waiting, self._waiting = list(self._waiting.values()), {}
        self.owners.clear()
        for i, (work, items, _) in enumerate(waiting):
            try:
                work(items)
            except BaseException:
                self.lost.update(*(seqs for _, _, seqs in waiting[i:]))
                raise

    def clear(self) -> None:
        """Drop all queued work, whose owners are gone. Else it would hold them, and the blocks that they read."""
        self._waiting.clear()
        self.owners.clear()
        self.lost.clear()

    def once(self, key: Hashable, make: Callable[[], _Made]) -> _Made:
        """Return make(), cached for the eight latest keys. The result is read-only and used on the current stream."""
        if key not in self._made:
            if len(self._made) == _KEPT:
                del self._made[next(iter(self._made))]
            self._made[key] = make()
        made: _Made = self._made[key]
        return made

    def numbers(self, rows: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
        """Return rows of numbers on the device, [R, C] int32, copied once for all layers without a host sync."""
        kept = tuple(rows)
        return self.once((kept, device), lambda: upload(kept, torch.int32, device))


class SpreadWork:
    """Jobs that run in order, a few with each step.

    due: the number of advance() calls by which all jobs must have begun.
    done: event that passes when all jobs are complete; None if the device is no GPU.
    """

    def __init__(self, device: torch.device, jobs: Iterable[Callable[[], None]] = (), due: int = 0) -> None:
        self.device, self.jobs, self.due = device, deque(jobs), due
        self.start: torch.cuda.Event | None = None
        self.done: torch.cuda.Event | None = None


class AuxStream:
    """One side stream per device for all layers of a cache. Its work runs in order, with memory for one layer at a time."""

    def __init__(self, made: list[torch.cuda.Stream] | None = None) -> None:
        self._made = [] if made is None else made  # streams of the cache, this one's included
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._waiting: deque[SpreadWork] = deque()
        self._advanced = 0

    @uncached_casts()
    def run(self, device: torch.device, job: Callable[[], object], *used: Tensor) -> torch.cuda.Event | None:
        """Run a job on the side stream, after the work that the current stream has been given so far.

        Returns the event that ends the job. Off a GPU, runs the job at once and returns None.

        used: tensors that the job reads and that their owners may free meanwhile.
        """
        if device.type != "cuda":
            job()
            return None
        stream = self._stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(stream):
                job()
                for tensor in used:
                    tensor.record_stream(stream)
                done: torch.cuda.Event = stream.record_event()
        except BaseException:  # what the job began may still read what its caller frees
            self.join(device)
            raise
        return done

    def join(self, device: torch.device) -> None:
        """Make the current stream wait for all work on the side stream."""
        if device in self._streams:
            torch.cuda.current_stream(device).wait_stream(self._streams[device])

    def spread(self, device: torch.device, jobs: Iterable[Callable[[], None]], steps: int, *used: Tensor) -> SpreadWork:
        """Queue jobs after the work that the current stream has been given so far. advance() runs a few of them with each
        step.

        steps: the number of steps within which all jobs begin.
        used: as in run().
        """
        work = SpreadWork(device, jobs, self._advanced + steps)
        if device.type == "cuda":
            work.start = torch.cuda.current_stream(device).record_event()
            for tensor in used:
                tensor.record_stream(self._stream(device))
        self._waiting.append(work)
        return work

    def advance(self) -> None:
        """Run this step's jobs in order: the number that keeps all queued work on time if every step runs that many.

        The host does not wait. A job that runs out of memory is left to finish().
        """
        count = most = 0
        for work in self._waiting:
            count += len(work.jobs)
            most = max(most, -(-count // max(1, work.due - self._advanced)))
        self._advanced += 1
        if not most:
            return
        # What the jobs make outlives the caller's mode.
        with torch.inference_mode(False), torch.no_grad(), suppress(torch.OutOfMemoryError):
            for _ in range(most):
                self._next(self._waiting[0])

    def finish(self, work: SpreadWork) -> None:
        """Run the remaining jobs of `work`. The host does not wait for them."""
        while work.jobs:
            self._next(work)

    def cancel(self, work: SpreadWork) -> None:
        """Cancel the remaining jobs of `work`. The host waits for jobs that have begun."""
        if work in self._waiting:
            self._waiting.remove(work)
        work.jobs.clear()
        if work.device in self._streams:
            self._streams[work.device].synchronize()

    def _next(self, work: SpreadWork) -> None:
        if work.device.type != "cuda":
            work.jobs[0]()
        else:
            stream = self._stream(work.device)
            if work.start is not None:
                stream.wait_event(work.start)
                work.start = None
            with torch.cuda.stream(stream):
                work.jobs[0]()
            if len(work.jobs) == 1:
                work.done = stream.record_event()
        work.jobs.popleft()
        if not work.jobs:
            self._waiting.remove(work)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
            self._made.append(self._streams[device])
        return self._streams[device]


_Found = TypeVar("_Found")
Observer = Callable[[Any, Tensor, Any], None]
"""Called after every sparse step of a layer, with the OffloadedLayer, the query [B, Hq, D], and the Choice or None.

An observer with a true attribute `graph_safe` neither waits for the device nor moves a tensor after its first step.
"""
_WITH_THREADS: weakref.WeakSet[Streams] = weakref.WeakSet()
"""Streams that have started a thread. A forked child inherits these objects, but not their threads."""


class Streams:
    """The copy stream and the threads that index, search and build, shared by the layers of a cache.

    prefetcher: copies KV back to the device for prompts in chunks.
    aux, deferred: for indexes on the device.
    memory, device: host and device memory of all layers.
    graph: the step being captured.
    layers: number of layers of the model.
    groups: counter that numbers layer groups.
    observers: called after each sparse step of each layer. Copies of a cache have none.
    """

    _IN_FLIGHT = 2  # layers whose keys and values may still be in transfer to the host

    def __init__(self, layers: int = 1, memory: HostMemory | None = None, device: DeviceMemory | None = None) -> None:
        self.layers, self.memory, self.device = layers, memory or HostMemory(), device or DeviceMemory()
        self.memory.streams = self.device.streams
        self.prefetcher, self.aux = KVPrefetcher(self.device.streams), AuxStream(self.device.streams)
        self.deferred = DeferredBatch()
        self.graph: SegmentedGraph | None = None
        self.observers: list[Observer] = []
        self.groups = count()
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._stream: torch.cuda.Stream | None = None
        self._copies: deque[torch.cuda.Event] = deque()

    @contextmanager
    def beside(self, device: torch.device) -> Iterator[None]:
        """Context in which the copy stream is current, behind all work enqueued so far, whose memory it may get; on GPUs only."""
        if device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
            self.device.streams.append(self._stream)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield

    def follow(self, device: torch.device) -> None:
        """Register the model's current stream. Memory that is freed and reused on any thread then waits for its reads."""
        if device.type == "cuda" and not capturing(device):
            current = torch.cuda.current_stream(device)
            if current not in self.device.streams:
                self.device.streams.append(current)

    @contextmanager
    def offloading(self, stores: Sequence[HostStore], *used: Tensor) -> Iterator[None]:
        """Context for copies of tensors' rows to stores. The stores then know the event of their arrival.

        On a GPU the copies overlap later work. The device waits for the copy before the last one, so at most a few layers'
        KV is held twice.

        used: tensors that the copies read.
        """
        device = used[0].device
        if device.type != "cuda":
            yield
            return
        current = torch.cuda.current_stream(device)
        with self.beside(device):
            yield
            stream = torch.cuda.current_stream(device)
            for tensor in used:
                tensor.record_stream(stream)
            done = stream.record_event()
        for store in stores:
            store.arrive(done, ordered=False)
        self._copies.append(done)
        if len(self._copies) > self._IN_FLIGHT:
            current.wait_event(self._copies.popleft())

    @contextmanager
    def records(self, graph: SegmentedGraph) -> Iterator[None]:
        """Context in which the layers' work is recorded in this step's graph."""
        self.graph = graph
        try:
            yield
        finally:
            self.graph = None

    def submit(self, after: torch.cuda.Event | None, job: Callable[[], None], group: int = 0) -> Future[None]:
        """Run a job on an indexing thread once an event has passed. Jobs of one layer group run in order.

        Even and odd groups run concurrently, since an append keeps at most one core per KV head busy.
        """
        return self._on(f"kvthaw-index-{group % 2}", after, job)

    def build(self, after: torch.cuda.Event | None, job: Callable[[], None], group: int = 0) -> Future[None]:
        """Run a job as submit() does, but on one of two build threads, for which no step waits."""
        return self._on(f"kvthaw-build-{group % 2}", after, job)

    def search(
        self, after: torch.cuda.Event | None, changes: Sequence[Future[None]], search: Callable[[], _Found]
    ) -> Future[_Found]:
        """Run a search on the search thread, in order, once an event has passed and `changes` of its index are done."""

        def run() -> _Found:
            for change in changes:
                change.result()
            return search()

        return self._on("kvthaw-search", after, run)

    def _on(self, name: str, after: torch.cuda.Event | None, job: Callable[[], _Found]) -> Future[_Found]:
        if name not in self._threads:
            _WITH_THREADS.add(self)
            self._threads[name] = ThreadPoolExecutor(1, thread_name_prefix=name)

        def run() -> _Found:
            if after is not None:
                after.synchronize()
            return job()

        return self._threads[name].submit(run)

    def run_beside(self, job: Callable[[], None]) -> None:
        """Run a job on a background thread. No caller waits for it."""
        self._on("kvthaw-memory", None, job)

    def drain(self) -> None:
        """Wait until the threads have run all their jobs."""
        for thread in list(self._threads.values()):
            thread.submit(lambda: None).result()


def _before_fork() -> None:
    for streams in list(_WITH_THREADS):
        streams.drain()  # the child must not inherit a half-changed index


def _after_fork_in_child() -> None:
    for streams in list(_WITH_THREADS):
        streams._threads.clear()  # the child has none of them, and starts new ones


os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)


def end_failed_capture(pool: Any) -> None:
    """End what torch began with a capture that CUDA refused to end: the pool that memory comes from, and the generator's part.

    Otherwise the process would never again use memory that a second stream had read, and could draw no random numbers on the GPU.
    """
    with suppress(RuntimeError):  # torch ended it
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):  # a graph that ends sets the generator
        torch.zeros(1, device="cuda")


class SegmentedGraph:
    """CUDA graphs of one step, split wherever the host has work to do.

    Work enqueued on the current stream inside ``with SegmentedGraph() as recording:`` is captured, not run; replay() runs
    it. The graphs share one memory pool, so later graphs can read the results of earlier ones. Other threads may continue
    meanwhile.

    pool: the memory pool, of torch.cuda.graph_pool_handle(), shared with other steps whose results are copied; None: its own.
    """

    def __init__(self, pool: Any = None) -> None:
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._calls: list[Callable[[], None]] = []
        self._under_way = ExitStack()
        self._before = torch.cuda.stream(torch.cuda.current_stream())  # which a capture that fails does not set again
        self._pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self._reached = torch.cuda.Event()

    def __enter__(self) -> SegmentedGraph:
        self._before.__enter__()
        try:
            self._begin()
        except BaseException:
            self._before.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._end(kind, error, trace)
        finally:
            self._before.__exit__(kind, error, trace)

    def host(self, call: Callable[[], None]) -> None:
        """Split the graph here: every replay waits for the device and runs call() before the rest."""
        self._end(None, None, None)
        self._calls.append(call)
        self._begin()

    def replay(self) -> None:
        """Run all graphs and calls. Returns when the last graph is launched. If a call raises, the rest does not run."""
        for graph, call in zip(self._graphs, self._calls, strict=False):
            graph.replay()
            self._reached.record()
            self._reached.synchronize()
            call()
        self._graphs[-1].replay()

    def _end(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._under_way.__exit__(kind, error, trace)
        except BaseException:
            end_failed_capture(self._pool)
            raise

    def _begin(self) -> None:
        self._graphs.append(torch.cuda.CUDAGraph())
        capture = torch.cuda.graph(self._graphs[-1], pool=self._pool, capture_error_mode="thread_local")
        self._under_way.enter_context(capture)
        self._under_way.enter_context(uncached_casts())
