"""Host memory for blocks of KV: the bytes available, and the blocks' owners."""

from __future__ import annotations

import ctypes
import logging
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvthaw.cache.page_locked import HUGE, PageLocked, locked_bytes
from kvthaw.cache.ranks import ALONE, Ranks
from kvthaw.errors import HostMemoryError, first_line

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


def check_host_memory(need: int, limit: int | None) -> None:
    """Raise HostMemoryError if `need` bytes exceed `limit`. None: the limit is what the system has free, if it tells."""
    free = available_host_memory() if limit is None else limit
    if free is not None and need > free:
        raise HostMemoryError(
            f"the prompt's KV needs {need:,} bytes of host memory and {free:,} are free; shorten the prompt, use fewer rows, "
            "or set host_bytes if you know of more"
        )


def release_freed_memory() -> None:
    """Return memory to the system that glibc still holds after tensors were freed. It takes milliseconds."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def available_host_memory(ranks: Ranks = ALONE) -> int | None:
    """Return this process's share of the bytes that the system has free; None if it does not tell."""
    free = _system_free()
    return None if free is None else free // ranks.size + _page_locked.spare_bytes


def _system_free() -> int | None:
    found = [free for free in (_machine_free(), container_free(Path("/sys/fs/cgroup"))) if free is not None]
    return min(found, default=None)


def _machine_free() -> int | None:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def container_free(group: Path) -> int | None:
    """Return the bytes that a container may still allocate before the system kills it; None if it has no limit.

    group: folder of its control group (version 2).
    """
    try:
        limit, current = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, limit - current + int(stat["active_file"]) + int(stat["inactive_file"]))  # files' pages make room
    except (OSError, ValueError, KeyError):
        return None


_page_locked = PageLocked(_system_free)
"""Memory that caches of this process have pinned, used or not. It is kept for reuse, as torch keeps its own."""


def held_bytes(size: int, *, pinned: bool) -> int:
    """Return the bytes of host memory that a tensor of `size` bytes takes."""
    return locked_bytes(size) if pinned else size


def beyond(blocks: int, room: int, size: int, *, pinned: bool) -> int:
    """Return the bytes of host memory that `blocks` blocks of `size` bytes take, less the blocks that fit on the device.

    room: bytes that the device has left.
    """
    return max(0, blocks - max(0, room) // size) * held_bytes(size, pinned=pinned)


def host_tensor(shape: Sequence[int], dtype: torch.dtype, *, pinned: bool, streams: Sequence[torch.cuda.Stream] = ()) -> Tensor:
    """Return an uninitialised tensor in host memory. Raises HostMemoryError if the system has none.

    pinned: pin it.
    streams: streams that may read it, in addition to the current one.
    """
    size = math.prod(shape) * dtype.itemsize
    if pinned and size > HUGE // 2:
        with suppress(OSError):  # torch's allocator then meets the same error, and reports it
            return _page_locked.tensor(shape, dtype, streams)
    try:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=pinned)
    except RuntimeError as error:
        kind = "pinned " if pinned else ""
        raise HostMemoryError(
            f"{size:,} more bytes of {kind}host memory could not be allocated ({first_line(error)}); shorten the prompt, "
            f"use fewer rows{', or raise the limits on locked memory (ulimit -l, the container)' if pinned else ''}"
        ) from error


def host_tensors(
    count: int, shape: Sequence[int], dtype: torch.dtype, *, pinned: bool, streams: Sequence[torch.cuda.Stream] = ()
) -> list[Tensor]:
    """Return `count` tensors as host_tensor() does. Threads may pin theirs at the same time."""
    if count > 1 and pinned and math.prod(shape) * dtype.itemsize > HUGE // 2:
        with suppress(OSError):
            return _page_locked.tensors(count, shape, dtype, streams)
    return [host_tensor(shape, dtype, pinned=pinned, streams=streams) for _ in range(count)]


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host as bytes."""
    data: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(data)


class _Used:
    """Bytes in use. The tensors' finalizers refer only to this object, since what they refer to lives as long as the tensors."""

    def __init__(self) -> None:
        self.bytes, self.lock = 0, threading.RLock()

    def release(self, size: int) -> None:
        with self.lock:  # a finalizer may run on any thread
            self.bytes -= size


class HostMemory:
    """Host memory of one cache's blocks, including blocks shared with copies.

    limit: the most bytes; None: all that the system has.
    stores: of blocks of this memory.
    reclaim: frees some memory that is kept for later requests, such as the prefix cache; returns whether there was any.
    """

    def __init__(self, limit: int | None = None, ranks: Ranks = ALONE) -> None:
        self.limit, self.ranks, self._used = limit, ranks, _Used()
        self.reclaim: Callable[[], bool] = lambda: False
        self._reclaiming = threading.RLock()  # reclaim() changes what only one thread may, such as a tree of prefixes
        self.streams: Sequence[torch.cuda.Stream] = ()
        """Streams that may read blocks, in addition to the model's."""
        self.stores: weakref.WeakSet[object] = weakref.WeakSet()

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> Tensor:
        """Return an uninitialised tensor in host memory. Raises HostMemoryError beyond the limit, or if the system gives none."""
        return self.allocate_all(1, shape, dtype, pinned=pinned)[0]

    def allocate_all(self, count: int, shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> list[Tensor]:
        """Return `count` tensors as allocate() does. Threads may pin theirs at the same time."""
        return self.retried(lambda: self._allocate_free(count, shape, dtype, pinned=pinned))

    def retried(self, attempt: Callable[[], _Result]) -> _Result:
        """Return attempt(). While it raises HostMemoryError, call reclaim() and repeat it."""
        while True:
            try:
                return attempt()
            except HostMemoryError:
                with self._reclaiming:
                    if not self.reclaim():
                        raise

    def allocate_free(self, shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> Tensor:
        """Allocate as allocate() does, without calling reclaim()."""
        return self._allocate_free(1, shape, dtype, pinned=pinned)[0]

    def _allocate_free(self, count: int, shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> list[Tensor]:
        if self.limit is None:
            return host_tensors(count, shape, dtype, pinned=pinned, streams=self.streams)
        size = held_bytes(math.prod(shape) * dtype.itemsize, pinned=pinned)
        with self._used.lock:
            free = self.limit - self.used
            if size * count > free:
                what = "block of KV needs" if count == 1 else f"{count} blocks of KV need"
                raise HostMemoryError(
                    f"the next {what} {size * count:,} bytes of host memory, and {max(0, free):,} of host_bytes={self.limit:,} are "
                    "free; crop the cache, let a request leave, or raise host_bytes"
                )
            self._used.bytes += size * count
        try:
            found = host_tensors(count, shape, dtype, pinned=pinned, streams=self.streams)
        except BaseException:
            self._used.release(size * count)
            raise
        for data in found:
            weakref.finalize(data, self._used.release, size).atexit = False
        return found

    def prepare(self, count: int, size: int, *, pinned: bool) -> None:
        """Pin memory for `count` blocks of `size` bytes, and part of that for each other layer, which will ask next."""
        soon = count * len(self.stores)
        if self.limit is not None:
            room = (self.limit - self.used) // held_bytes(size, pinned=pinned)
            count, soon = min(count, room), min(soon, room)
        if pinned and count > 0 and size > HUGE // 2:
            _page_locked.prepare(size, count, soon)

    def short_of(self, count: int, size: int) -> bool:
        """Return whether less than half of `count` blocks of `size` bytes, or of the room, are pinned and unused, or will be."""
        room = count if self.limit is None else max(0, (self.limit - self.used) // held_bytes(size, pinned=True))
        return 2 * _page_locked.coming(size) < min(count, room)

    def expect(self, count: int, size: int) -> Callable[[], None] | None:
        """Return a function that pins memory for `count` blocks of `size` bytes; None if there is enough. Ends earlier calls."""
        room = None if self.limit is None else max(0, (self.limit - self.used) // held_bytes(size, pinned=True))
        few = size > HUGE // 2 and _page_locked.expect(size, count, room)
        return _page_locked.take_ahead if few else None

    @property
    def used(self) -> int:
        """Bytes in use, counted only if there is a limit."""
        return self._used.bytes

    def check(self, need: Callable[[], int]) -> None:
        """Raise HostMemoryError if a prompt's KV needs more bytes than are free.

        need: returns the bytes needed; called again after each reclaim(), which may free device memory.
        """
        self.retried(lambda: check_host_memory(need(), self.free()))

    def free(self) -> int | None:
        """Return the bytes that are free in every process; None if the system does not tell."""
        free = available_host_memory(self.ranks) if self.limit is None else self.limit - self.used
        return None if free is None else self.ranks.least(free)


class Block:
    """E tokens of all KV heads of one sequence, data [H, E, 2, D], on the device or in host memory.

    place: its address, and whether it lies on the host.
    moving: the copy that is being made on the other side.
    recalls: decayed count of how often its rows were selected; infinite before the first count.
    """

    __slots__ = ("_owners", "data", "moving", "on_device", "place", "recalls")

    def __init__(self, data: Tensor, *, on_device: bool = False) -> None:
        self.data, self.on_device, self.place = data, on_device, (data.data_ptr(), not on_device)
        self._owners: list[None] = []  # append() and pop() are atomic, so a finalizer on another thread is safe
        self.recalls = math.inf
        self.moving: Block | None = None

    @property
    def owners(self) -> int:
        """Number of sequences, prefix caches and swapped-out sequences that hold the block. Only a sole owner may write to it."""
        return len(self._owners)

    def share(self) -> Block:
        """Add one owner. Returns the block."""
        self._owners.append(None)
        return self

    def copied(self, memory: HostMemory) -> Block:
        """Return a copy of a block of the device in host memory. It is only enqueued. Raises HostMemoryError."""
        twin = Block(memory.allocate(self.data.shape, self.data.dtype, pinned=self.data.is_cuda))
        twin.data.copy_(self.data, non_blocking=True)
        twin.recalls = self.recalls
        return twin

    def release(self) -> None:
        """Remove one owner."""
        self._owners.pop()
