"""Earlier KV on its way back from the host, for a prompt that comes in chunks.

A chunk of c tokens attends to n earlier ones with 4 Hq D c n operations, for which 4 H D n bytes (bf16) cross the bus. At 660
TFLOP/s and 55 GB/s the bus is hidden from c = 12,000 H / Hq on: 3,000 tokens where four query heads share a KV head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

import torch
from torch import Tensor

from kvthaw.cache.host import HostStore
from kvthaw.kernels.dense import BLOCK, LONG, RUN, runs

_HELD = 1 << 30  # bytes of a buffer for rows that are copied on the device, but for RUN


def longest_run(token_bytes: int, queries: int) -> int:
    """Return how many rows on the device are copied, and attended to, at once by so many queries."""
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


class KVPrefetcher:
    """Two blocks on the device, filled by turns on a stream of their own while the other one is attended to.

    Shared by the layers of a cache, so that the first blocks of a layer come while the one before still computes.
    """

    def __init__(self, made: list[torch.cuda.Stream] | None = None) -> None:
        self._made = [] if made is None else made  # streams of the cache, this one's included
        self._stream: torch.cuda.Stream | None = None
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self._read: list[torch.cuda.Event | None] = [None, None]  # ends the last reading of each
        self._turn = 0

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

        after: ends the copy of the last of them to their blocks. A block is good until the next is asked for, and one at a time may
        be on its way. The first copy begins at once.
        """
        gather = store.gathers(seq, device)
        if gather is not None:
            most = longest_run(store.kv_heads * store.row_bytes, queries)
            return _gathered(gather, buffer_for(store, most, device), stop, most)
        sizes = runs(stop, RUN if queries >= BLOCK else BLOCK)
        spans = [(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
        if device.type != "cuda" or not spans:
            return (store.read(seq, *span) for span in spans)
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
            self._made.append(self._stream)
        if after is not None:
            self._stream.wait_event(after)
        return self._streamed(store, seq, spans, device, [self._bring(store, seq, *span, device) for span in spans[:1]])

    def _streamed(
        self,
        store: HostStore,
        seq: int,
        spans: list[tuple[int, int]],
        device: torch.device,
        coming: list[tuple[int, Tensor, torch.cuda.Event]],
    ) -> Iterator[Tensor]:
        for following in [*spans[1:], None]:
            turn, block, brought = coming.pop()
            if following is not None:
                coming.append(self._bring(store, seq, *following, device))
            current = torch.cuda.current_stream(device)
            current.wait_event(brought)
            try:
                yield block
            finally:
                self._read[turn] = current.record_event()

    def _bring(
        self, store: HostStore, seq: int, start: int, stop: int, device: torch.device
    ) -> tuple[int, Tensor, torch.cuda.Event]:
        """Enqueue the copy of rows start .. stop into the buffer whose turn it is, behind its last reading."""
        assert self._stream is not None
        turn, self._turn = self._turn, 1 - self._turn
        block = self._buffer(turn, store, stop - start, device)
        read = self._read[turn]
        if read is not None:
            self._stream.wait_event(read)
        with torch.cuda.stream(self._stream):
            store.copy_to(block, seq, start)
        return turn, block, self._stream.record_event()

    def _buffer(self, turn: int, store: HostStore, rows: int, device: torch.device) -> Tensor:
        need = store.kv_heads * rows * 2 * store.head_dim * store.dtype.itemsize
        if self._buffers[turn].numel() < need or self._buffers[turn].device != device:
            assert self._stream is not None
            self._buffers[turn] = torch.empty(need, dtype=torch.uint8, device=device)
            self._buffers[turn].record_stream(self._stream)
            self._stream.wait_stream(torch.cuda.current_stream(device))  # who had this memory before may still use it
        shape = (store.kv_heads, rows, 2, store.head_dim)
        return self._buffers[turn][:need].view(store.dtype).view(shape)

    def release(self) -> None:
        """Let the blocks go; they come again when they are needed."""
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self._read = [None, None]

    def __deepcopy__(self, memo: dict[int, object]) -> KVPrefetcher:
        return KVPrefetcher()
