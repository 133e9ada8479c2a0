"""Pinned memory for blocks of KV: in huge pages, by several threads, and reused.

The system maps memory page by page on first write, and pinning costs time per page and per call. Blocks therefore use 2 MiB
pages if the system has them. Blocks requested together are written on several threads and pinned in one call: 4 GiB then
take 0.24 s, against 1.9 s with torch's allocator (H200). Freed blocks stay pinned for reuse, at most a quarter of the
host's free memory; the rest is returned. Memory that a long prompt will need is pinned ahead within the same limit.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HUGE = 2 << 20
"""Bytes of a large page."""
_AT_ONCE = 256 << 20  # bytes pinned by one call
_SHARE = 4  # 1 / the part of the host's free memory that may stay pinned and unused
_THREADS = 16


def locked_bytes(size: int) -> int:
    """Return the pinned bytes of a tensor of `size` bytes: whole huge pages, or up to half a page a power of two, as in torch."""
    return -(-size // HUGE) * HUGE if size > HUGE // 2 else 1 << (size - 1).bit_length()


class _Mapping(mmap.mmap):
    """Pinned memory from `address` on, which the GPU may read until the object is freed."""

    runtime: Any = None  # the CUDA runtime that pinned it
    address = blocks = 0

    def __del__(self) -> None:
        with suppress(Exception):  # the process may be ending
            if self.runtime is not None and int(self.runtime.cudaHostUnregister(self.address)):
                _STILL_PINNED.append(self)


_STILL_PINNED: list[_Mapping] = []
"""Memory that CUDA did not unpin. It stays mapped: a new mapping at its addresses would be read from the old physical pages."""


@dataclass(frozen=True, slots=True)
class _Block:
    """A part of a mapping."""

    mapping: _Mapping
    address: int


def page_lock(size: int, blocks: int, runtime: Any) -> list[_Block]:
    """Return `blocks` pinned blocks of `size` bytes each, in whole huge pages. Raises OSError if the system has no memory.

    runtime: `torch.cuda.cudart()`.
    """
    mapping = _Mapping(-1, size * blocks + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without huge pages has small ones
        mapping.madvise(mmap.MADV_HUGEPAGE)
    with suppress(OSError):  # a forked child does not need it, and its copies of pinned pages would differ from the GPU's
        mapping.madvise(mmap.MADV_DONTFORK)
    mapping.blocks = blocks
    mapping.address = -(-torch.frombuffer(mapping, dtype=torch.uint8).data_ptr() // HUGE) * HUGE
    made = [_Block(mapping, mapping.address + i * size) for i in range(blocks)]
    with ThreadPoolExecutor(min(blocks, _THREADS, os.cpu_count() or 1)) as threads:
        list(threads.map(lambda block: ctypes.memset(block.address, 0, size), made))
    if int(runtime.cudaHostRegister(mapping.address, size * blocks, 0)):
        with suppress(Exception):  # clear the error, which torch's next launch would raise
            torch.zeros(1, device="cuda")
        raise OSError(f"{size * blocks:,} bytes cannot be pinned")
    mapping.runtime = runtime
    return made


class PageLocked:
    """The pinned memory of a process. Any thread may use it.

    available: returns the host's free bytes; None: unknown.
    """

    def __init__(self, available: Callable[[], int | None], runtime: Callable[[], Any] = torch.cuda.cudart) -> None:
        self._available, self._runtime = available, runtime
        self._freed: deque[tuple[_Block, int, Sequence[Any]]] = deque()  # a finalizer appends
        self._spare: dict[int, deque[tuple[_Block, list[Any]]]] = {}
        # by block size: blocks to be pinned ahead, and blocks being pinned
        self._expected, self._coming = Counter[int](), Counter[int]()
        self._lock = threading.Lock()

    @property
    def spare_bytes(self) -> int:
        """Bytes that are pinned and unused, or being pinned ahead."""
        self._settle()
        with self._lock:
            return self._unused_bytes()

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, streams: Sequence[torch.cuda.Stream] = ()) -> Tensor:
        """Return an uninitialised tensor that any stream or the host may write: all earlier readers of its memory are done.

        Raises OSError if the system has no memory.

        streams: streams that may read the tensor, in addition to the current ones of the thread that asks for memory next.
        """
        return self.tensors(1, shape, dtype, streams)[0]

    def tensors(
        self, count: int, shape: Sequence[int], dtype: torch.dtype, streams: Sequence[torch.cuda.Stream] = ()
    ) -> list[Tensor]:
        """Return `count` tensors as tensor() does. Raises OSError, with none of them in use, if the system has no memory.

        Threads may call it at the same time: CUDA registers the pages of one while the system maps pages of another.
        """
        size, found = locked_bytes(math.prod(shape) * dtype.itemsize), list[_Block]()
        try:
            while (lack := count - len(found)) > 0:
                unused = self._unused(size)
                found += [unused] if unused is not None else self._new(size, min(lack, max(1, _AT_ONCE // size)))
        except BaseException:
            self._keep(size, found)
            raise
        return [self._as_tensor(block, size, shape, dtype, streams) for block in found]

    def _as_tensor(
        self, block: _Block, size: int, shape: Sequence[int], dtype: torch.dtype, streams: Sequence[torch.cuda.Stream]
    ) -> Tensor:
        memory = (ctypes.c_char * size).from_address(block.address)  # what the tensor's storage holds, and all its views
        weakref.finalize(memory, self._freed.append, (block, size, streams)).atexit = False
        return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(tuple(shape))

    def prepare(self, size: int, count: int, soon: int = 0) -> None:
        """Pin up to `count` tensors of `size` bytes ahead of use.

        soon: tensors, these included, that callers will request next. One system call may pin them all.
        """
        size = locked_bytes(size)
        self._settle()
        with self._lock:
            held = len(self._spare.get(size, ()))
        count, soon = count - held, soon - held
        while count > 0 and max(count, soon) > 1:
            try:
                made = self._new(size, min(max(count, soon), max(1, _AT_ONCE // size)))
            except OSError:
                return
            self._keep(size, made)
            count, soon = count - len(made), soon - len(made)

    def coming(self, size: int) -> int:
        """Return how many tensors of `size` bytes are pinned and unused, or will be."""
        size = locked_bytes(size)
        with self._lock:
            return len(self._spare.get(size, ())) + self._coming[size] + self._expected[size]

    def expect(self, size: int, count: int, most: int | None = None) -> bool:
        """Set how many tensors of `size` bytes take_ahead() pins. Replaces an earlier call. Returns whether there are any to
        pin.

        most: tensors that there is room for; None: unknown.
        """
        size, count = locked_bytes(size), count if most is None else min(count, most)
        with self._lock:
            held = len(self._spare.get(size, ())) + self._coming[size]
            lack = count - held
            if lack > 0:  # not one by one, if others take some meanwhile
                lack = max(lack, min(count, _AT_ONCE // size))
                lack = lack if most is None else min(lack, most - held)
            self._expected[size] = max(0, lack)
            return lack > 0

    def take_ahead(self) -> None:
        """Pin the expected blocks on a background thread, as long as the limit for unused pinned memory allows.

        It records no events for freed blocks, because another thread may be capturing a step.
        """
        while (found := self._next_expected()) is not None:
            made = list[_Block]()
            try:
                made = self._new(*found)
            except OSError:
                with self._lock:
                    self._expected.clear()
            finally:
                self._keep(found[0], made, found[1])

    def _next_expected(self) -> tuple[int, int] | None:
        """Return the size and number of blocks to pin ahead in one call, or None."""
        free = self._available()
        with self._lock:
            for size, expected in self._expected.items():
                count = min(expected, max(1, _AT_ONCE // size))
                if count and (free is None or (self._unused_bytes() + size * count) * _SHARE <= free):
                    self._expected[size] -= count
                    self._coming[size] += count
                    return size, count
                self._expected[size] = 0
        return None

    def _keep(self, size: int, made: Sequence[_Block], coming: int = 0) -> None:
        """Add new blocks to the free list.

        coming: how many blocks were being pinned ahead, and are not any more.
        """
        with self._lock:
            self._spare.setdefault(size, deque()).extendleft((block, []) for block in made)
            self._coming[size] -= coming

    def _new(self, size: int, count: int) -> list[_Block]:
        """Return `count` new blocks, or fewer if memory is short. Raises OSError if the system has no memory."""
        free = self._available()
        while free is not None and free < size * count and self._give_back():
            free = self._available()
        if free is not None and free < size:  # the system would kill a process that writes to more
            raise OSError(f"{free:,} bytes are free")
        device = torch.cuda.device(next(iter(_devices_in_use()), None)) if torch.cuda.is_available() else nullcontext()
        with device:  # also on a thread that uses none
            return page_lock(size, count if free is None else min(count, free // size), self._runtime())

    def _unused_bytes(self) -> int:
        coming = sum(size * count for size, count in self._coming.items())
        return coming + sum(size * len(held) for size, held in self._spare.items())

    def _unused(self, size: int) -> _Block | None:
        """Return a free block of this size that no work on the device may read any more, or None."""
        self._settle()
        with self._lock:
            spare = self._spare.get(size)
            return spare.popleft()[0] if spare and all(event.query() for event in spare[0][1]) else None

    def _settle(self) -> None:
        """Record the work that may still read the blocks freed since the last call, and return memory beyond the limit."""
        if not self._freed:
            return
        known: dict[int, tuple[Sequence[Any], list[Any]]] = {}
        with self._lock:  # finalizers, which may run meanwhile, do not take the lock
            while self._freed:
                block, size, streams = self._freed[0]
                if id(streams) not in known:
                    known[id(streams)] = streams, [stream.record_event() for stream in _readers(streams)]
                self._spare.setdefault(size, deque()).append((block, known[id(streams)][1]))
                self._freed.popleft()
        free = self._available()
        while free is not None and self.spare_bytes * _SHARE > free and (given := self._give_back()):
            free += given

    def _give_back(self) -> int:
        """Return unused memory that was pinned by one call to the system. Returns its bytes; 0 if there is none."""
        with self._lock:
            for size, held in self._spare.items():
                unused = Counter(block.mapping for block, _ in held)
                mapping = next((mapping for mapping, count in unused.items() if count == mapping.blocks), None)
                if mapping is not None:
                    events = [event for block, own in held if block.mapping is mapping for event in own]
                    self._spare[size] = deque(each for each in held if each[0].mapping is not mapping)
                    break
            else:
                return 0
        for event in events:
            event.synchronize()
        return size * mapping.blocks


def _devices_in_use() -> list[int]:
    """Return the devices that this process uses. A thread's current device may be another, where it would create a context."""
    if not torch.cuda.is_available():
        return []
    used = getattr(torch._C, "_cuda_hasPrimaryContext", lambda number: number == torch.cuda.current_device())
    return [number for number in range(torch.cuda.device_count()) if used(number)]


def _readers(streams: Sequence[torch.cuda.Stream]) -> set[torch.cuda.Stream]:
    """Return `streams` and the current streams of all devices in use."""
    return {*streams, *(torch.cuda.current_stream(number) for number in _devices_in_use())}
