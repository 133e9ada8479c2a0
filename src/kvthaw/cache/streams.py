"""Offloading, indexing and searching beside the device's work (IceCache, figure 5b).

While the device computes the next layers, keys and values of a finished one leave it on a stream of their own, and a thread
indexes them as soon as they have arrived, another those of the layer behind it. Another searches with predicted queries, two more
build indexes of prompts, and of sequences that join others, and one pins memory for what is to come.
"""

from __future__ import annotations

import copy
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvthaw.cache.aux_stream import AuxStream
from kvthaw.cache.deferred_batch import DeferredBatch
from kvthaw.cache.device_memory import DeviceMemory
from kvthaw.cache.host import HostStore
from kvthaw.cache.host_memory import HostMemory
from kvthaw.cache.kv_prefetcher import KVPrefetcher
from kvthaw.cache.segmented_graph import SegmentedGraph

_Found = TypeVar("_Found")
Observer = Callable[[Any, Tensor, Any], None]
"""Called with an OffloadedLayer, the query [B, Hq, D] and the Choice, or None, of every sparse step that the layer has taken. Where
it has an attribute `graph_safe` that is true, it neither waits for the device nor moves a tensor once it has seen a step."""
_WITH_THREADS: weakref.WeakSet[Streams] = weakref.WeakSet()
"""Streams that have started a thread. A forked child inherits them, but none of their threads."""


class Streams:
    """One copy stream and threads that index, search and build, shared by the layers of a cache; prefetcher: the way back; aux
    and deferred: for indexes that work on the device. memory, device: host and device memory of all layers. graph: the step that is
    captured now. layers: of the model. groups: numbers for groups of layers.
    observers: called after each sparse step of each layer; copies of a cache have none."""

    _IN_FLIGHT = 2  # layers whose keys and values may still be on their way out

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

    def copy_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream for copies beside the model."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
            self.device.streams.append(self._stream)
        return self._stream

    @contextmanager
    def beside(self, device: torch.device) -> Iterator[None]:
        """Within it the copy stream is the current one, where the device is a GPU, behind what the current one has been given: work
        on memory that is freed, and about to be taken here, may not be done."""
        if device.type != "cuda":
            yield
            return
        stream = self.copy_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield

    def follow(self, device: torch.device) -> None:
        """Remember the stream that the model runs on: whichever thread takes memory that was freed waits for what it may read."""
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            current = torch.cuda.current_stream(device)
            if current not in self.device.streams:
                self.device.streams.append(current)

    def offload(self, store: HostStore, seq: int, keys: Tensor, values: Tensor) -> None:
        """Append keys and values [H, n, D] to a sequence; see offloading()."""
        with self.offloading([store], keys, values):
            store.append(seq, torch.stack((keys, values), dim=2), non_blocking=keys.is_cuda)

    @contextmanager
    def offloading(self, stores: Sequence[HostStore], *used: Tensor) -> Iterator[None]:
        """Within it, rows of tensors are copied to stores, which know when they have arrived.

        On a GPU the copy goes beside later work; the device waits for the one before the last, so that what few layers gave is
        ever held twice.
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
        """Within it, what layers do becomes part of this step's recording."""
        self.graph = graph
        try:
            yield
        finally:
            self.graph = None

    def submit(self, after: torch.cuda.Event | None, job: Callable[[], None], group: int = 0) -> Future[None]:
        """Run a job on an indexing thread once an event has passed. Jobs of a group of layers run in the order given; those of even
        and of odd groups side by side, since an append keeps no more cores busy than a layer has KV heads."""
        return self._on(f"kvthaw-index-{group % 2}", after, job)

    def build(self, after: torch.cuda.Event | None, job: Callable[[], None], group: int = 0) -> Future[None]:
        """As submit(), on two threads for jobs that no step waits for: between the levels of its trees a layer, too, keeps no more
        cores busy than it has KV heads."""
        return self._on(f"kvthaw-build-{group % 2}", after, job)

    def search(
        self, after: torch.cuda.Event | None, changes: Sequence[Future[None]], search: Callable[[], _Found]
    ) -> Future[_Found]:
        """Run a search on the searching thread once an event has passed and the changes that its index was given are done; those of
        other layers, which take as long as a layer's whole step, go on beside it. Searches run in the order given."""

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
        """Run a job that nobody waits for on a thread of its own."""
        self._on("kvthaw-memory", None, job)

    def drain(self) -> None:
        """Wait until the threads have run every job that they were given."""
        for thread in list(self._threads.values()):
            thread.submit(lambda: None).result()

    def forget_threads(self) -> None:
        """Start new threads for the next jobs: this process is a forked child, which has none of its parent's."""
        self._threads.clear()

    def __deepcopy__(self, memo: dict[int, object]) -> Streams:
        twin = Streams(self.layers, copy.deepcopy(self.memory, memo), copy.deepcopy(self.device, memo))
        twin.deferred = copy.deepcopy(self.deferred, memo)  # that of the copied indexes
        memo[id(self.aux)] = twin.aux
        return twin


def _before_fork() -> None:
    for streams in list(_WITH_THREADS):
        streams.drain()  # the child must not inherit an index that a thread has changed half


def _after_fork_in_child() -> None:
    for streams in list(_WITH_THREADS):
        streams.forget_threads()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
