"""Prefetch earlier KV from the host for a prompt that comes in chunks.

For a chunk of c tokens and n earlier ones, attention takes 4 Hq D c n operations. 4 H D n bytes (bf16) cross the bus. At
660 TFLOP/s and 55 GB/s, attention hides the bus from c = 12,000 H / Hq on. That is 3,000 tokens if four query heads share a
KV head, and fewer with the layer's matrix products, which overlap too.
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

_HELD = 1 << 30  # bytes of a buffer for rows that are copied on the device, unless RUN rows take more
_STAGED = 1 << 28  # bytes prefetched and not yet attended to: the bytes that the bus transfers during a layer's products


def longest_run(token_bytes: int, queries: int) -> int:
    """Return the rows per copy on the device, which `queries` queries attend to at once."""
    return RUN if queries >= BLOCK else max(BLOCK, min(LONG, 1 << (_HELD // token_bytes).bit_length() - 1))


def buffer_for(store: HostStore, most: int, device: torch.device) -> Tensor:
    """Return a buffer on the device for a copy of `most` rows of a store, [H, n, 2, D].

    If `most` exceeds RUN, the buffer holds all rows that a sequence has room for, within _HELD bytes. Its strides then
    equal a dense layer's, on which the plans of attention depend.
    """
    held = most if most <= RUN else max(most, _HELD // store.token_bytes)
    rows = min(held, store.table.on(device).shape[1] * store.block_size)
    return torch.empty((store.kv_heads, rows, 2, store.head_dim), dtype=store.dtype, device=device)


def _gathered(gather: Callable[[int, Tensor], None], buffer: Tensor, stop: int, most: int) -> Iterator[Tensor]:
    for start in range(0, stop, most):
        rows = buffer[:, : min(most, stop - start)]
        gather(start, rows)
        yield from rows.split(runs(rows.shape[1], most), dim=1)


class _Place:
    """A buffer on the device for one run of rows.

    addresses: int64 on the device, of the blocks that fit in it.
    brought: event that ends the latest copy into the buffer.
    read: event that ends the latest read of it.
    """

    def __init__(self, device: torch.device, size: int, blocks: int, stream: torch.cuda.Stream) -> None:
        self.data = torch.empty(blocks * size, dtype=torch.uint8, device=device)
        self.data.record_stream(stream)
        begin = self.data.data_ptr()
        self.addresses = torch.arange(begin, begin + blocks * size, size, dtype=torch.int64, device=device)
        self.brought = self.read = torch.cuda.current_stream(device).record_event()


class KVPrefetcher:
    """Prefetch runs of rows to the device on a side stream while attention works on earlier runs.

    Copy engines copy whole blocks: a kernel there would wait for the multiprocessors that attention occupies, and all copies
    behind it. A kernel on the model's stream makes a run contiguous, between two attentions. The layers of a cache share one
    prefetcher, so the first runs of a layer arrive while the layer before still computes.
    """

    def __init__(self, made: list[torch.cuda.Stream] | None = None) -> None:
        self._made = [] if made is None else made  # streams of the cache, this one's included
        self._stream: torch.cuda.Stream | None = None
        self._places: dict[tuple[torch.device, int], deque[_Place]] = {}  # by the size of blocks
        self._rows = torch.empty(0, dtype=torch.uint8)  # that attention reads

    def blocks(self, store: HostStore, seq: int, stop: int, device: torch.device, *, queries: int = BLOCK) -> Iterator[Tensor]:
        """Yield rows 0 .. stop of a sequence in order on the device, [H, n, 2, D] each.

        A piece has up to RUN rows. For fewer than BLOCK queries it has BLOCK rows, or up to LONG rows if the whole sequence
        lies on the device. A piece is valid until the next is requested. The first copy starts at once, and each later copy
        one piece ahead.
        """
        gather = store.gathers(seq, device)
        if gather is not None:
            most = longest_run(store.token_bytes, queries)
            return _gathered(gather, buffer_for(store, most, device), stop, most)
        sizes = runs(stop, most := RUN if queries >= BLOCK else BLOCK)
        spans = [(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
        if device.type != "cuda" or not HAS_TRITON or not spans:
            store.wait()
            return (store.read(seq, *span).to(device) for span in spans)
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        if store.arriving is not None:
            self._side(device).wait_event(store.arriving)
        return self._streamed(
            store, seq, spans, most, device, [self._bring(store, seq, *span, most, device) for span in spans[:1]]
        )

    def read(self, store: HostStore, seq: int, start: int, out: Tensor) -> None:
        """Copy rows from `start` on of a sequence to out [H, n, 2, D] on a GPU."""
        if (gather := store.gathers(seq, out.device)) is not None:
            gather(start, out)
            return
        at = 0
        for rows in self.blocks(store, seq, start + out.shape[1], out.device, queries=1):
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
        """Enqueue the copy of rows start .. stop to the next buffer, after the buffer's latest read."""
        place, stream = self._next_place(store, most, device), self._side(device)
        stream.wait_event(place.read)
        with torch.cuda.stream(stream):
            bring_blocks(store, seq, start, stop, place.data)
            place.brought = stream.record_event()
        return place

    def _side_by_side(self, store: HostStore, seq: int, start: int, stop: int, place: _Place) -> Tensor:
        """Return the prefetched rows start .. stop as one contiguous tensor. Its kernel is enqueued on the current stream."""
        shape = store.kv_heads, stop - start, *store.format.tail
        rows = self._rows[: math.prod(shape) * store.format.stored.itemsize].view(store.format.stored).view(shape)
        table = brought_addresses(store, seq, start, stop, place.addresses)
        stream_rows(table, store.block_size, start % store.block_size, rows)
        return store.format.decode(rows)

    def _next_place(self, store: HostStore, most: int, device: torch.device) -> _Place:
        run, size, blocks = most * store.token_bytes, store.block_bytes, -(-most // store.block_size) + 1
        places = self._places.get((device, size))
        if places is None or len(places[0].addresses) < blocks:
            count, stream = min(4, max(2, _STAGED // run)), self._side(device)
            places = self._places[device, size] = deque(_Place(device, size, blocks, stream) for _ in range(count))
        if self._rows.numel() < run or self._rows.device != device:
            self._rows = torch.empty(run, dtype=torch.uint8, device=device)
        places.rotate(1)
        return places[0]

    def _side(self, device: torch.device) -> torch.cuda.Stream:
        """Return the side stream, which the first call makes."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
            self._made.append(self._stream)
        return self._stream

    def release(self) -> None:
        """Free the buffers. The next chunk allocates them again."""
        self._places, self._rows = {}, torch.empty(0, dtype=torch.uint8)


def bring_blocks(store: HostStore, seq: int, start: int, stop: int, out: Tensor) -> None:
    """Copy rows start .. stop of a sequence from blocks on the host to `out`, one block after another, on the current stream.

    out: bytes. Each block keeps its layout; blocks on the device are skipped.
    """
    size, first = store.block_size, start // store.block_size
    blocks = store.blocks(seq)[first : -(-stop // size)]
    held = out[: len(blocks) * store.block_bytes].view(store.format.stored).view(-1, *store.shape)
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
    """Return the addresses of the blocks that hold rows start .. stop of a sequence, int64 on the device.

    brought: addresses at which bring_blocks() put the blocks of the host.
    """
    span = slice(start // store.block_size, -(-stop // store.block_size))
    blocks = store.blocks(seq)[span]
    if not any(block.on_device for block in blocks):
        return brought[: len(blocks)]
    there = store.table.on(brought.device)[seq, span]
    return torch.where(store.table.on_host[seq, span], brought[: len(blocks)], there)
