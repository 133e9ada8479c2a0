"""The frozen part: an append-only store of rows in host memory, one per layer.

A row is one token of one KV head, its K then its V. Rows lie in token order in extents of [H, E, 2, D], pinned where there is a
GPU. Nothing is ever rewritten, so extents are shared between lanes that have a prefix in common (beams, repeated prompts) and
copied only when a lane writes into one that it shares.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from kvthaw.cache.addresses import Addresses
from kvthaw.cache.pool import Slab
from kvthaw.cache.together import Together
from kvthaw.errors import HostMemoryError
from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.freeze import Span, freeze
from kvthaw.kernels.freeze import definition as freeze_definition
from kvthaw.kernels.offload import MOST, offload
from kvthaw.kernels.stream_keys import definition as stream_definition
from kvthaw.kernels.stream_keys import stream_keys


def check_host_memory(need: int, limit: int | None) -> None:
    """Raise HostMemoryError where `need` bytes exceed `limit`, or what the system has free where limit is None and it tells."""
    free = _available() if limit is None else limit
    if free is not None and need > free:
        raise HostMemoryError(
            f"the prompt's KV needs {need:,} bytes of host memory and {free:,} are free; shorten the prompt, use fewer rows, "
            "or set host_bytes if you know of more"
        )


def _available() -> int | None:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def host_tensor(shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """An uninitialised tensor in host memory, page-locked if pinned. Raises HostMemoryError where the system gives none."""
    try:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=pinned)
    except RuntimeError as error:
        size, kind = math.prod(shape) * dtype.itemsize, "pinned " if pinned else ""
        raise HostMemoryError(
            f"{size:,} more bytes of {kind}host memory cannot be had ({str(error).splitlines()[0]}); shorten the prompt, use fewer "
            f"rows{', or raise the limits on locked memory (ulimit -l, the container)' if pinned else ''}"
        ) from error


class HostMemory:
    """Host memory that the blocks of one cache take, spares and blocks that it shares with copies included.

    limit: the most bytes; None: as many as the system gives. used: bytes now, counted where there is a limit.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit, self.used = limit, 0
        self._stores: weakref.WeakSet[HostStore] = weakref.WeakSet()

    def join(self, store: HostStore) -> None:
        """Serve a store."""
        self._stores.add(store)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> Tensor:
        """Return an uninitialised tensor in host memory. Raises HostMemoryError beyond the limit, or if the system gives none."""
        if self.limit is None:
            return host_tensor(shape, dtype, pinned=pinned)
        size = math.prod(shape) * dtype.itemsize
        if self.used + size > self.limit:
            raise HostMemoryError(
                f"the next block of KV needs {size:,} bytes of host memory, and {max(0, self.limit - self.used):,} of host_bytes="
                f"{self.limit:,} are free; crop the cache, let a request leave, or raise host_bytes"
            )
        data = host_tensor(shape, dtype, pinned=pinned)
        self.used += size
        weakref.finalize(data, self._release, size).atexit = False
        return data

    def check(self, need: int) -> None:
        """Raise HostMemoryError if a prompt's KV needs more bytes than are free. Spares count as free."""
        spare = sum(store.spare_bytes() for store in self._stores)
        check_host_memory(need, None if self.limit is None else self.limit - self.used + spare)

    def spare(self, store: HostStore) -> Tensor | None:
        """Take a spare block from any store whose blocks are of the same kind."""
        return next((block for other in (store, *self._stores) if (block := other.give_spare(store)) is not None), None)

    def _release(self, size: int) -> None:
        self.used -= size

    def __deepcopy__(self, memo: dict[int, object]) -> HostMemory:
        return HostMemory(self.limit)


class Extent:
    """E tokens of all KV heads of one lane, and how many lanes point at it."""

    __slots__ = ("data", "owners")

    def __init__(self, data: Tensor) -> None:
        self.data = data  # [H, E, 2, D]
        self.owners = 1


class HostStore:
    """Rows of one layer, by lane and position.

    Rows 0 .. length(lane) - 1 of a lane are readable. `extent` is E. Every extent is one contiguous tensor, so that the K of
    row (h, t) begins ((h * E + t % E) * 2) * D elements after address `addresses(lane)[t // E]`, and its V follows K.
    """

    def __init__(
        self,
        lanes: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        *,
        extent: int = 1024,
        pinned: bool = False,
        memory: HostMemory | None = None,
    ) -> None:
        self.memory = memory or HostMemory()
        self.memory.join(self)
        self.kv_heads, self.head_dim, self.dtype = kv_heads, head_dim, dtype
        self.extent, self.pinned = extent, pinned
        self._extents: list[list[Extent]] = [[] for _ in range(lanes)]
        self._spares: dict[int, Tensor] = {}  # by lane; in no table, so that taking one moves nothing
        self._length = [0] * lanes
        self.version = 0
        """Changes whenever addresses do."""
        self._table: tuple[int, Tensor] | None = None
        self._sent = Addresses()
        self.arriving: torch.cuda.Event | None = None
        """Passes when all rows appended so far are there; None: they are."""
        self.ordered = True
        """Whether what the device does next on the current stream comes after that."""

    @property
    def lanes(self) -> int:
        return len(self._extents)

    def length(self, lane: int) -> int:
        """Tokens of a lane that are readable."""
        return self._length[lane]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, K and V."""
        return 2 * self.head_dim * self.dtype.itemsize

    def nbytes(self, lane: int | None = None) -> int:
        """Bytes of host memory held by the extents of one lane, or by all and the spares, shared extents counted once."""
        held = self._extents if lane is None else [self._extents[lane]]
        unique = {id(e): e.data for extents in held for e in extents}
        spares = self._spares.values() if lane is None else ()
        return sum(data.nbytes for data in (*unique.values(), *spares))

    def addresses(self, lane: int) -> Tensor:
        """[extents] int64: where each extent of a lane begins."""
        return torch.tensor([e.data.data_ptr() for e in self._extents[lane]], dtype=torch.int64)

    def table(self) -> Tensor:
        """[lanes, most extents] int64: the addresses of all lanes, 0 padded."""
        known, version = self._table, self.version  # read first: another thread may add extents meanwhile
        if known is None or known[0] != version:
            tables = [self.addresses(lane) for lane in range(self.lanes)]
            known = self._table = version, torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)
        return known[1]

    def append(self, lane: int, rows: Tensor, *, non_blocking: bool = False) -> None:
        """Add rows [H, n, 2, D] of any device behind a lane's last. With non_blocking, a copy from the device is only
        enqueued on the current stream; the caller waits before anyone reads. The tokens of a head neighbour each other."""
        start, n = self._length[lane], rows.shape[1]
        self.reserve(lane, start + n)
        done = 0
        while done < n:
            at = start + done
            extent = self._writable(lane, at // self.extent)
            offset = at % self.extent
            take = min(n - done, self.extent - offset)
            source = rows[:, done : done + take]
            if take == self.extent:
                extent.copy_(source, non_blocking=non_blocking)
            elif HAS_TRITON and non_blocking and rows.is_cuda and self.pinned and take < MOST:
                offload(source, extent, offset)
            else:  # a part of an extent is one contiguous piece a head
                for h in range(self.kv_heads):
                    extent[h, offset : offset + take].copy_(source[h], non_blocking=non_blocking)
            done += take
        self._length[lane] = start + n

    def freeze(self, slab: Slab, spans: Sequence[Span], together: Together) -> None:
        """Add rows of some lanes, at most one span each, which begins behind the lane's last and stands in sink or ring. From a GPU
        that is only enqueued on the current stream; the caller waits before anyone reads."""
        for lane, start, count in spans:
            self.claim(lane, start + count)
        for lane, start, count in spans:  # not before there is room for all
            self._length[lane] = start + count
        place = {"sink": slab.regions.sink, "ring": slab.regions.ring}
        if HAS_TRITON and slab.data.is_cuda and self.pinned:
            table = self._sent.follow(self, slab.data.device)
            most = max(count for _, _, count in spans)
            freeze(slab.data, table, self.extent, together.numbers(spans, slab.data.device), most, **place)
        else:
            extents = [[extent.data for extent in own] for own in self._extents]
            freeze_definition(slab.data, extents, self.extent, spans, **place)

    def prepare(self, slab: Slab, together: Together) -> None:
        """Have the kernel of freeze() compiled, which takes a third of a second: no step should wait for that. Writes nothing."""
        if HAS_TRITON and slab.data.is_cuda and self.pinned:
            place = {"sink": slab.regions.sink, "ring": slab.regions.ring}
            table, none = self._sent.follow(self, slab.data.device), together.numbers([(0, 0, 0)], slab.data.device)
            freeze(slab.data, table, self.extent, none, 1, **place)

    def arrive(self, copied: torch.cuda.Event, *, ordered: bool) -> None:
        """All rows appended so far are there when `copied` passes. ordered: it was recorded on the current stream."""
        self.arriving, self.ordered = copied, ordered

    def wait(self) -> None:
        """Until all rows are there: the host reads them next."""
        if self.arriving is not None:
            self.arriving.synchronize()
            self.arriving, self.ordered = None, True

    def order(self, device: torch.device) -> None:
        """The device reads them next, on its current stream; the host does not wait."""
        if self.arriving is not None and not self.ordered:
            torch.cuda.current_stream(device).wait_event(self.arriving)
            self.ordered = True

    def reserve(self, lane: int, length: int) -> None:
        """Allocate extents for `length` tokens of a lane."""
        extents = self._extents[lane]
        while len(extents) * self.extent < length:
            extents.append(Extent(self._memory(lane)))
            self.version += 1

    def claim(self, lane: int, length: int) -> None:
        """Allocate what appending up to `length` tokens of a lane takes, copies of shared blocks included."""
        self.reserve(lane, length)
        for number in range(self._length[lane] // self.extent, -(-length // self.extent)):
            self._writable(lane, number)

    def reserved(self, lane: int) -> int:
        """Tokens that a lane's extents have room for, its spare not counted."""
        return len(self._extents[lane]) * self.extent

    def take_spare(self, lane: int) -> None:
        """Allocate the extent that a lane will need next, where it has none to spare. No address changes before it is needed.
        Raises HostMemoryError where the system gives none; nothing has changed then."""
        if lane not in self._spares:
            self._spares[lane] = self._allocate()

    def _memory(self, lane: int) -> Tensor:
        """For an extent that a lane needs now: its spare, or new; if none can be had, the spare of another lane or layer."""
        spare = self._spares.pop(lane, None)
        if spare is not None:
            return spare
        try:
            return self._allocate()
        except HostMemoryError:
            spare = self.memory.spare(self)
            if spare is None:
                raise
            return spare

    def _allocate(self) -> Tensor:
        return self.memory.allocate((self.kv_heads, self.extent, 2, self.head_dim), self.dtype, pinned=self.pinned)

    def spare_bytes(self) -> int:
        """Bytes of the spare blocks."""
        return sum(data.nbytes for data in self._spares.values())

    def give_spare(self, other: HostStore) -> Tensor | None:
        """Take a spare block away for a store whose blocks are of the same kind; None if there is none."""
        kinds = [(s.kv_heads, s.head_dim, s.dtype, s.extent, s.pinned) for s in (self, other)]
        return self._spares.popitem()[1] if self._spares and kinds[0] == kinds[1] else None

    def read(self, lane: int, start: int, stop: int) -> Tensor:
        """Rows start .. stop of a lane as [H, stop - start, 2, D] on the host; a view where they lie in one extent."""
        if not 0 <= start <= stop <= self._length[lane]:
            raise IndexError(f"rows {start}..{stop} of lane {lane}, which holds {self._length[lane]}")
        parts = []
        while start < stop:
            offset = start % self.extent
            take = min(stop - start, self.extent - offset)
            parts.append(self._extents[lane][start // self.extent].data[:, offset : offset + take])
            start += take
        if not parts:
            return torch.empty((self.kv_heads, 0, 2, self.head_dim), dtype=self.dtype)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def read_keys(self, lane: int, start: int, stop: int, device: torch.device, out: Tensor | None = None) -> Tensor:
        """Copy the keys of rows start .. stop of a lane to out [H, stop - start, D] on `device`, each head contiguous; allocate
        out if None. Waits for rows that are still being copied to the host: a kernel on the current stream, else this thread."""
        if not 0 <= start <= stop <= self._length[lane]:
            raise IndexError(f"rows {start}..{stop} of lane {lane}, which holds {self._length[lane]}")
        if out is None:
            out = torch.empty((self.kv_heads, stop - start, self.head_dim), dtype=self.dtype, device=device)
        if HAS_TRITON and device.type == "cuda" and self.pinned:
            if self.arriving is not None:
                torch.cuda.current_stream(device).wait_event(self.arriving)
            table = self.addresses(lane).pin_memory().to(device, non_blocking=True)
            stream_keys(table, self.extent, start, out)
        else:
            if self.arriving is not None:
                self.arriving.synchronize()
            stream_definition([extent.data for extent in self._extents[lane]], start, out)
        return out

    def copy_to(self, block: Tensor, lane: int, start: int) -> None:
        """Copy the rows from `start` on into block [H, n, 2, D] of any device, extent by extent. From pinned memory to a GPU
        that is only enqueued on the current stream."""
        done, n = 0, block.shape[1]
        if start + n > self._length[lane]:
            raise IndexError(f"rows {start}..{start + n} of lane {lane}, which holds {self._length[lane]}")
        while done < n:
            number, offset = divmod(start + done, self.extent)
            take = min(n - done, self.extent - offset)
            rows, target = self._extents[lane][number].data, block[:, done : done + take]
            if take == self.extent:
                target.copy_(rows, non_blocking=True)
            else:  # a part of an extent is one contiguous piece a head
                for h in range(self.kv_heads):
                    target[h].copy_(rows[h, offset : offset + take], non_blocking=True)
            done += take

    def truncate(self, lane: int, length: int) -> None:
        """Forget rows >= length; extents no longer needed are let go, but for one to spare where rows are left."""
        if length > self._length[lane]:
            raise IndexError(f"lane {lane} holds {self._length[lane]} rows, fewer than {length}")
        keep = -(-length // self.extent)
        for extent in self._extents[lane][keep:]:
            extent.owners -= 1
            if not extent.owners:
                self._spares.setdefault(lane, extent.data)
        if length == 0:
            self._spares.pop(lane, None)
        del self._extents[lane][keep:]
        self._length[lane] = length
        self.version += 1

    def share(self, other: HostStore) -> None:
        """Hold another store's rows in the place of one's own, extents shared until either writes into one. Raises ValueError where
        the two differ in a row's or an extent's size."""
        sizes = [(s.kv_heads, s.head_dim, s.dtype, s.extent, s.pinned) for s in (self, other)]
        if sizes[0] != sizes[1]:
            raise ValueError(f"a store of {sizes[0]} cannot share rows of one of {sizes[1]}")
        for lane in range(self.lanes):
            self.truncate(lane, 0)
        self._extents, self._length = [list(extents) for extents in other._extents], list(other._length)
        for extents in self._extents:
            for extent in extents:
                extent.owners += 1
        self.version += 1

    def reorder(self, lanes: Sequence[int]) -> None:
        """Lane i becomes what lane lanes[i] was, but for what it has to spare. No row is copied: lanes share extents until one
        writes."""
        extents = [list(self._extents[lane]) for lane in lanes]
        for old in self._extents:
            for extent in old:
                extent.owners -= 1
        for new in extents:
            for extent in new:
                extent.owners += 1
        self._extents, self._length = extents, [self._length[lane] for lane in lanes]
        self._spares = {lane: spare for lane, spare in self._spares.items() if lane < len(lanes)}
        self.version += 1

    def __deepcopy__(self, memo: dict[int, object]) -> HostStore:
        """A store of its own whose extents are shared until either writes, with nothing to spare."""
        memory = copy.deepcopy(self.memory, memo)
        twin = HostStore(0, self.kv_heads, self.head_dim, self.dtype, extent=self.extent, pinned=self.pinned, memory=memory)
        twin._extents = [list(extents) for extents in self._extents]
        twin._length = list(self._length)
        for extents in twin._extents:
            for extent in extents:
                extent.owners += 1
        return twin

    def _writable(self, lane: int, number: int) -> Tensor:
        extent = self._extents[lane][number]
        if extent.owners > 1:
            copy = self._memory(lane).copy_(extent.data)
            extent.owners -= 1
            extent = self._extents[lane][number] = Extent(copy)
            self.version += 1
        return extent.data
