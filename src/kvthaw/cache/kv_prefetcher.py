"""Earlier KV on its way back from the host, for a prompt that comes in chunks.

A chunk of c tokens attends to n earlier ones with 4 Hq D c n operations, for which 4 H D n bytes (bf16) cross the bus. At 660
TFLOP/s and 55 GB/s the bus is hidden from c = 12,000 H / Hq on: 3,000 tokens where four query heads share a KV head, less beside
the layer's matrix products, which go on meanwhile.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from itertools import accumulate

import torch
from torch import Tensor

from kvthaw.cache.host import HostStore
from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.dense import BLOCK, LONG, RUN, runs
from kvthaw.kernels.stream_keys import stream_rows

_HELD = 1 << 30  # bytes of a buffer for rows that are copied on the device, but for RUN
_STAGED = 1 << 28  # bytes that are on their way or wait to be attended to: as much as the bus brings during a layer's products


def longest_run(token_bytes: int, queries: int) -> int:
    """Return the rows on the device that one copy brings and `queries` queries attend to at once."""
    return RUN if queries >= BLOCK else max(BLOCK, min(LONG, 1 << (_HELD // token_bytes).bit_length() - 1))


def buffer_for(store: HostStore, most: int, device: torch.device) -> Tensor:
    """Return room for a copy of `most` rows [H, n, 2, D] of a store on the device; if that is more than RUN, of all that a
    sequence has room for where they are not too many: the strides of a dense layer, for attention's plans depend on them."""
    held = most if most <= RUN else max(most, _HELD // (store.kv_heads * store.row_bytes))
    rows = min(held, store.table_on(device).shape[1] * store.block_size)
    return torch.empty((store.kv_heads, rows, 2, store.head_dim), dtype=store.dtype, device=device)


def _gathered(gather: Callable[[int, Tensor], None], buffer: Tensor, stop: int, most: int) -> Iterator[Tensor]:
    for start in range(0, stop, most):
        rows = buffer[:, : min(most, stop - start)]
        gather(start, rows)
        yield from rows.split(runs(rows.shape[1], most), dim=1)


class _Place:
    """Room on the device for what is brought of a run. addresses: of the blocks that it has room for, int64 on the device. brought,
    read: end the copy to it, and the latest reading."""

    def __init__(self, device: torch.device, size: int, blocks: int, stream: torch.cuda.Stream) -> None:
        self.data = torch.empty(blocks * size, dtype=torch.uint8, device=device)
        self.data.record_stream(stream)
        begin = self.data.data_ptr()
        self.addresses = torch.arange(begin, begin + blocks * size, size, dtype=torch.int64, device=device)
        self.brought = self.read = torch.cuda.current_stream(device).record_event()


class KVPrefetcher:
    """Runs of rows on their way to the device on a stream of their own, while earlier ones are attended to.

    Copy engines bring blocks as they lie: a kernel on that stream would wait for the multiprocessors that attention occupies, and
    all copies behind it too, so that the bus would stand still most of the time. Side by side a run's rows are put on the model's
    stream, between two attentions: 31 us for 16k tokens of an 8B model's layer, to which a chunk of 2,048 attends for 830.

    Shared by the layers of a cache, so that the first runs of a layer come while the one before still computes.
    """

    def __init__(self, made: list[torch.cuda.Stream] | None = None) -> None:
        self._made = [] if made is None else made  # streams of the cache, this one's included
        self._stream: torch.cuda.Stream | None = None
        self._places: dict[tuple[torch.device, int], deque[_Place]] = {}  # by the size of blocks
        self._rows = torch.empty(0, dtype=torch.uint8)  # that attention reads

    def blocks(
        self,
        store: HostStore,
        seq: int,
        stop: int,
        device: torch.device,
        after: torch.cuda.Event | None = None,
        *,
        queries: int = BLOCK,
    ) -> Iterator[Tensor]:
        """Return rows 0 .. stop of a sequence in order, [H, n, 2, D] each, on the device, in `runs` of RUN; for fewer than BLOCK
        queries of BLOCK, where all of the sequence lies on the device of up to LONG.

        after: ends the copy of the last of them to their blocks. A run is good until the next is asked for, which is on its way
        then. The first copy begins at once.
        """
        gather = store.gathers(seq, device)
        if gather is not None:
            most = longest_run(store.kv_heads * store.row_bytes, queries)
            return _gathered(gather, buffer_for(store, most, device), stop, most)
        sizes = runs(stop, most := RUN if queries >= BLOCK else BLOCK)
        spans = [(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
        if device.type != "cuda" or not spans:
            return (store.read(seq, *span) for span in spans)
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
            self._made.append(self._stream)
        if after is not None:
            self._stream.wait_event(after)
        return self._streamed(
            store, seq, spans, most, device, [self._bring(store, seq, *span, most, device) for span in spans[:1]]
        )

    def read(self, store: HostStore, seq: int, start: int, out: Tensor, after: torch.cuda.Event | None) -> None:
        """Copy rows from `start` on of a sequence to out [H, n, 2, D] on a GPU; after: as for blocks()."""
        current = torch.cuda.current_stream(out.device)
        if (gather := store.gathers(seq, out.device)) is not None:
            if after is not None:
                current.wait_event(after)
            gather(start, out)
            return
        at = 0
        for rows in self.blocks(store, seq, start + out.shape[1], out.device, after, queries=1):
            end = at + rows.shape[1]
            if end > start:
                out[:, max(0, at - start) : end - start].copy_(rows[:, max(0, start - at) :])
            at = end

    def _streamed(
        self, store: HostStore, seq: int, spans: list[tuple[int, int]], most: int, device: torch.device, coming: list[_Place]
    ) -> Iterator[Tensor]:
        for span, following in zip(spans, [*spans[1:], None], strict=True):
            place, current = coming.pop(), torch.cuda.current_stream(device)
            if following is not None:
                coming.append(self._bring(store, seq, *following, most, device))
            current.wait_event(place.brought)
            try:
                yield self._side_by_side(store, seq, *span, place)
            finally:
                place.read = current.record_event()

    def _bring(self, store: HostStore, seq: int, start: int, stop: int, most: int, device: torch.device) -> _Place:
        """Enqueue the copy of rows start .. stop to the next place, behind the place's last reading."""
        place = self._next_place(store, most, device)
        assert self._stream is not None
        self._stream.wait_event(place.read)
        with torch.cuda.stream(self._stream):
            if in_blocks(store):
                bring_blocks(store, seq, start, stop, place.data)
            else:
                store.copy_to(_rows_in(place.data, store, stop - start), seq, start)
            place.brought = self._stream.record_event()
        return place

    def _side_by_side(self, store: HostStore, seq: int, start: int, stop: int, place: _Place) -> Tensor:
        """Return rows start .. stop, which were brought to a place, in one piece; what it takes to that end is enqueued on the
        current stream."""
        if not in_blocks(store):
            return _rows_in(place.data, store, stop - start)
        shape = store.kv_heads, stop - start, *store.format.tail
        rows = self._rows[: math.prod(shape) * store.format.stored.itemsize].view(store.format.stored).view(shape)
        table = brought_addresses(store, seq, start, stop, place.addresses)
        stream_rows(table, store.block_size, start % store.block_size, rows)
        return store.format.decode(rows)

    def _next_place(self, store: HostStore, most: int, device: torch.device) -> _Place:
        run, size, blocks = most * store.kv_heads * store.row_bytes, store.allocator.size, -(-most // store.block_size) + 1
        if not in_blocks(store):
            size, blocks = most * store.kv_heads * 2 * store.head_dim * store.dtype.itemsize, 1
        places = self._places.get((device, size))
        if places is None or len(places[0].addresses) < blocks:
            assert self._stream is not None
            count = min(4, max(2, _STAGED // run))
            places = self._places[device, size] = deque(_Place(device, size, blocks, self._stream) for _ in range(count))
        if self._rows.numel() < run or self._rows.device != device:
            self._rows = torch.empty(run, dtype=torch.uint8, device=device)
        places.rotate(1)
        return places[0]

    def release(self) -> None:
        """Free the buffers. The next chunk allocates them again."""
        self._places, self._rows = {}, torch.empty(0, dtype=torch.uint8)

    def __deepcopy__(self, memo: dict[int, object]) -> KVPrefetcher:
        return KVPrefetcher()


def in_blocks(store: HostStore) -> bool:
    """Return whether a store's blocks are brought as they lie: where a kernel can put their rows side by side, and they are not so
    large that a run has but a part of one."""
    return HAS_TRITON and store.block_size <= BLOCK


def bring_blocks(store: HostStore, seq: int, start: int, stop: int, out: Tensor) -> None:
    """Copy what blocks on the host have of rows start .. stop of a sequence to out, bytes, where they lie one after the other as
    blocks; enqueued on the current stream."""
    size, first = store.block_size, start // store.block_size
    blocks = store.blocks(seq)[first : -(-stop // size)]
    held = out[: len(blocks) * store.allocator.size].view(store.format.stored).view(-1, *store.allocator.shape)
    for number, (to, block) in enumerate(zip(held, blocks, strict=True), first):
        begin, end = max(0, start - number * size), min(size, stop - number * size)
        if block.on_device:
            continue
        if end - begin == size:
            to.copy_(block.data, non_blocking=True)
            continue
        for mine, rows in zip(to, block.data, strict=True):  # a part of a block is one contiguous piece a head
            mine[begin:end].copy_(rows[begin:end], non_blocking=True)


def brought_addresses(store: HostStore, seq: int, start: int, stop: int, brought: Tensor) -> Tensor:
    """Return the addresses of the blocks that have rows start .. stop of a sequence, int64 on the device: of those on the host
    `brought`, where bring_blocks() put them."""
    span = slice(start // store.block_size, -(-stop // store.block_size))
    blocks = store.blocks(seq)[span]
    if not any(block.on_device for block in blocks):
        return brought[: len(blocks)]
    there = store.table_on(brought.device)[seq, span]
    return torch.where(store.on_device.on_host[seq, span], brought[: len(blocks)], there)


def _rows_in(data: Tensor, store: HostStore, rows: int) -> Tensor:
    shape = store.kv_heads, rows, 2, store.head_dim
    return data[: math.prod(shape) * store.dtype.itemsize].view(store.dtype).view(shape)
