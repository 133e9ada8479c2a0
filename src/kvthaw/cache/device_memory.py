"""Device memory for blocks of KV: each layer's share of it, and the blocks in it."""

from __future__ import annotations

import gc
import logging
import math
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor
from torch._C import _cuda_beginAllocateCurrentThreadToPool, _cuda_endAllocateToPool, _cuda_releasePool

from kvthaw.cache.ranks import ALONE, Ranks
from kvthaw.errors import first_line

_log = logging.getLogger(__name__)
_CHUNK = 6  # blocks that are allocated at once: torch gives a tensor above 10 MiB memory of its own, and blocks have 2 MiB

T = TypeVar("T")


def margin(total: int) -> int:
    """Return how many of a device's bytes are kept for activations: 2 GiB and 1/16 of all."""
    return total // 16 + (2 << 30)


def spare(free: int, total: int) -> int:
    """Return how many of a device's free bytes a cache may fill."""
    return max(0, free - margin(total))


def available(device: torch.device) -> tuple[int, int]:
    """Return the free bytes of a GPU, and of all its bytes how many torch may take."""
    free, total = torch.cuda.mem_get_info(device)
    return free, int(total * torch.cuda.get_per_process_memory_fraction(device))


class _Collector:
    """How many threads need the process's garbage collector disabled, and whether it was enabled before."""

    def __init__(self) -> None:
        self.uses, self.enabled, self.lock = 0, False, threading.Lock()


_COLLECTOR = _Collector()


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection. It stops all threads, and a capture fails if it destroys an earlier graph.

    Threads may be in this context at the same time: the last one to leave it enables the collector again.
    """
    with _COLLECTOR.lock:
        if _COLLECTOR.uses == 0:
            _COLLECTOR.enabled = gc.isenabled()
            gc.disable()
        _COLLECTOR.uses += 1
    try:
        yield
    finally:
        with _COLLECTOR.lock:
            _COLLECTOR.uses -= 1
            if _COLLECTOR.uses == 0 and _COLLECTOR.enabled:
                gc.enable()


class DeviceMemory:
    """Device memory of one cache: at most `limit` bytes, shared evenly by the layers that offload.

    On a CPU, a block "on the device" is an unpinned tensor. Several blocks are allocated at once; the limit counts them
    when they are used.

    limit: None or 0 places no block on the device. "auto": the bytes free when the first layer is allocated, less a margin
        for activations.
    offloaded: the numbers of the layers that share it.
    bytes: the limit as a number.
    spills: blocks may lie on the host, because some do or because sequences may outgrow the device. Once True, stays until
        reset().
    fixed: by layer, bytes that always lie on the device and count against the limit: sink, ring, pool and index, or all KV
        of a dense layer.
    streams: streams that may read blocks, in addition to the current one.
    blocks: of each layer.
    """

    def __init__(self, limit: int | str | None = None, offloaded: Collection[int] = (), ranks: Ranks = ALONE) -> None:
        self.limit, self.offloaded, self.ranks = limit, frozenset(offloaded), ranks
        self.fixed: dict[int, int] = {}
        self.streams: list[torch.cuda.Stream] = []
        self.bytes, self.spills = limit if isinstance(limit, int) else 0, False
        self.blocks: list[DeviceBlocks] = []
        self._pool: _Pool | None = None
        self._nested = False  # within allocate()

    def allocate(self, device: torch.device, work: Callable[[], T]) -> T:
        """Run work that allocates tensors that outlive a forward. Returns what it returns.

        On a GPU with a limit these tensors have a pool of their own, apart from what activations free. Torch frees no cached
        memory for such a pool. So if memory is short, this frees it and runs the work again.

        work: may run twice, the second time after an error in the middle.
        """
        if device.type != "cuda" or not self.limit or self._nested:
            return work()
        try:
            return self._in_pool(device, work)
        except torch.OutOfMemoryError:
            pass  # the exception holds the tensors that fit, until here
        torch.cuda.empty_cache()
        return self._in_pool(device, work)

    def _in_pool(self, device: torch.device, work: Callable[[], T]) -> T:
        if self._pool is None:
            self._pool = _Pool(device)
        self._nested = True
        try:
            with self._pool.used():
                return work()
        finally:
            self._nested = False

    def leave_pool(self) -> None:
        """Allocate from a new pool from now on. The old pool's memory returns to the device as its tensors are freed."""
        self._pool = None

    def trim(self, device: torch.device) -> None:
        """Return memory to the device: of chunks without a block in use, and what torch caches. Waits for the device."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        for blocks in self.blocks:
            blocks.trim()
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def resolve(self, device: torch.device) -> None:
        """Set `bytes` if the limit is "auto". On a CPU it stays 0.

        On a GPU it is the free bytes that torch may take (`torch.cuda.set_per_process_memory_fraction`), less the margin of
        `spare`. All processes use the smallest value of any.
        """
        if self.limit == "auto" and not self.bytes and device.type == "cuda":
            free, total = available(device)
            taken = torch.cuda.memory_allocated(device)
            free = min(free + torch.cuda.memory_reserved(device), total) - taken + sum(self.fixed.values())
            self.bytes = self.ranks.least(spare(free, total))

    def keeps(self, size: int, device: torch.device) -> bool:
        """Return whether a prefill may keep `size` bytes while it attends: a seventh of those for activations.

        With 24 GiB that is 512 MiB, the KV of 128k tokens in a layer of 8 heads of 128 dimensions.
        """
        return device.type == "cpu" or 7 * size <= margin(available(device)[1])

    def share(self, layer: int) -> int:
        """Return the bytes that blocks of a layer may take."""
        if not self.bytes:
            return 0
        dense = 0
        if not self.fixed.keys() <= self.offloaded:
            dense = sum(held for number, held in self.fixed.items() if number not in self.offloaded)
        return (self.bytes - dense) // len(self.offloaded) - self.fixed.get(layer, 0)

    def copy_from(self, other: DeviceMemory) -> None:
        """Limit blocks as in another cache of equal settings."""
        self.offloaded, self.fixed = other.offloaded, dict(other.fixed)
        self.bytes, self.spills = other.bytes, other.spills

    def reset(self) -> None:
        """Free the blocks and the pool, forget `fixed`, and return to the configured limit."""
        self.fixed.clear()
        self.blocks.clear()
        self.leave_pool()
        self.bytes, self.spills = self.limit if isinstance(self.limit, int) else 0, False


class _Pool:
    """A part of torch's allocator for a device. Its memory may return to the device once this object and its tensors are freed.

    It is no torch.cuda.MemPool: if the garbage collector destroys one while another allocates, torch ends the process.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._name = index, torch.cuda.graph_pool_handle()
        _cuda_beginAllocateCurrentThreadToPool(*self._name)  # makes the pool, with one use, which the finalizer ends
        _cuda_endAllocateToPool(*self._name)
        weakref.finalize(self, _cuda_releasePool, *self._name).atexit = False

    @contextmanager
    def used(self) -> Iterator[None]:
        """Context in which the current thread allocates from this pool."""
        _cuda_beginAllocateCurrentThreadToPool(*self._name)
        try:
            yield
        finally:
            _cuda_endAllocateToPool(*self._name)
            _cuda_releasePool(*self._name)


class DeviceBlocks:
    """Blocks of one layer on the device, in chunks of its own. A freed block is reused after all work that may read it."""

    def __init__(
        self, memory: DeviceMemory, layer: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.memory, self.layer, self.device = memory, layer, device
        self.shape, self.dtype, self.size = shape, dtype, math.prod(shape) * dtype.itemsize
        self._taken, self._short = 0, False
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None  # the model's
        self._freed: deque[tuple[Tensor, int]] = deque()  # a finalizer appends, on any thread
        self._ready: deque[tuple[Tensor, int, list[torch.cuda.Event]]] = deque()
        self._waited: tuple[torch.cuda.Stream, list[torch.cuda.Event]] | None = None  # the latest wait
        memory.blocks.append(self)

    @property
    def used(self) -> int:
        """Bytes of the blocks in use."""
        return (self._taken - len(self._freed)) * self.size

    @property
    def room(self) -> int:
        """Bytes that are left for blocks. Negative if index or slab have outgrown their part."""
        return self.memory.share(self.layer) - self.used

    def take(self, count: int) -> list[Tensor]:
        """Return `count` uninitialised blocks, to be written on the current stream; fewer if there is no room for all."""
        count, found = min(count, max(0, self.room) // self.size), list[Tensor]()
        if count:
            self.note_freed()
        while len(found) < count and (self._ready or self._adds_chunk()):
            found.append(self._take())
        return found

    def _take(self) -> Tensor:
        """Return a block of a chunk."""
        chunk, i, events = self._ready.popleft()
        if events:  # which hundreds of blocks share
            stream, waited = torch.cuda.current_stream(self.device), self._waited
            if waited is None or waited[0] != stream or waited[1] is not events:
                for event in events:
                    stream.wait_event(event)
                self._waited = stream, events
        block = chunk[i]
        self._taken += 1
        weakref.finalize(block, self._freed.append, (chunk, i)).atexit = False
        return block

    def _adds_chunk(self) -> bool:
        """Allocate a chunk. Returns False, and logs this once, if the device has no memory."""
        try:
            with torch.cuda.stream(self._stream):  # which owns the memory, whichever stream writes to it first
                chunk = self.memory.allocate(
                    self.device, lambda: torch.empty((_CHUNK, *self.shape), dtype=self.dtype, device=self.device)
                )
        except torch.OutOfMemoryError as error:
            if not self._short:
                self._short = True
                _log.warning("device memory is short, blocks go to the host: %s", first_line(error))
            return False
        for stream in self.memory.streams:
            chunk.record_stream(stream)
        before = [] if self._stream is None else [self._stream.record_event()]  # whose work may still use that memory
        self._ready.extend((chunk, i, before) for i in range(_CHUNK))
        return True

    def trim(self) -> None:
        """Free the chunks without a block in use. All work that may read them must be done."""
        self.note_freed()
        ready = Counter(id(chunk) for chunk, _, _ in self._ready)
        self._ready = deque(one for one in self._ready if ready[id(one[0])] < _CHUNK)

    def note_freed(self) -> None:
        """Record the GPU work that may still read the blocks freed since the last call, often hundreds."""
        if count := len(self._freed):
            readers = self.readers()
            self._ready.extend((*self._freed.popleft(), readers) for _ in range(count))
            self._taken -= count

    def readers(self) -> list[torch.cuda.Event]:
        """Record events that pass when all work enqueued so far that may read blocks is done."""
        if self.device.type != "cuda":
            return []
        return [stream.record_event() for stream in (torch.cuda.current_stream(self.device), *self.memory.streams)]
