"""Copy tokens from the device to the stores: a layer's prompts, and the tokens that leave the rings of all layers."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from kvthaw.cache.host import HostStore, write
from kvthaw.cache.pool import Slab
from kvthaw.cache.streams import Streams
from kvthaw.errors import HostMemoryError
from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.freeze import Span, freeze
from kvthaw.kernels.freeze import definition as freeze_definition


class Offloader:
    """Fill the store of one layer from prompts and from the layer's ring.

    The store's length is the watermark: rows below it are not copied again.
    """

    def __init__(self, store: HostStore, slab: Slab, streams: Streams) -> None:
        self.store, self.slab, self.streams = store, slab, streams
        self._latest: dict[int, tuple[int, int]] = {}  # rows before and after the latest copy from a ring
        if self.on_gpu:  # compiled now, which takes a third of a second: no step should wait for that
            _copy([self], [(0, 0, 0, 0)])

    @property
    def on_gpu(self) -> bool:
        """Whether a kernel copies the tokens that leave the ring."""
        return HAS_TRITON and self.slab.data.is_cuda and self.store.pinned

    @property
    def kind(self) -> Hashable:
        """Properties that layers must share for one kernel to copy their rows."""
        data = self.slab.data
        return data.shape, data.dtype, data.device, self.slab.regions, self.store.allocator.kind

    def stored(self, seq: int, stop: int) -> int:
        """Return the first position below `stop` that is not offloaded yet."""
        return min(self.store.length(seq), stop)

    def prompt(self, seq: int, past: int, keys: Tensor, values: Tensor) -> None:
        """Offload keys and values [H, n, D] of a prompt from position `past` on. The copy overlaps later work.

        Earlier tokens that are only in the ring are offloaded first.
        """
        self.up_to({seq: past})
        shared = self.store.length(seq) - past
        self.streams.offload(self.store, seq, keys[:, shared:], values[:, shared:])

    def up_to(self, positions: Mapping[int, int]) -> None:
        """Offload each sequence's tokens up to a position that are only in sink or ring."""
        spans = [(seq, stop, stop, stored) for seq, stop in positions.items() if (stored := self.stored(seq, stop)) < stop]
        if spans:
            offload([self], spans)

    def extend(self, spans: Sequence[tuple[int, int, int]]) -> None:
        """Count tokens (sequence, start, stop) that are being copied from the ring to the store, which has space for them."""
        for seq, start, stop in spans:
            self.store.extend(seq, stop)
            self._latest[seq] = start, stop

    def wait(self) -> None:
        """Wait until all copies are complete. Call it before the host reads the store."""
        self.store.wait()

    def wait_on_stream(self) -> None:
        """Make the current stream wait for all copies, before the device reads the store. The host does not wait."""
        self.store.order(self.slab.data.device)

    def read(self, seq: int, start: int, stop: int) -> Tensor:
        """Return rows [H, stop - start, 2, D] of a sequence, from store and ring, on the host or on the device."""
        self.wait()
        stored = min(max(self.store.length(seq), start), stop)
        if stored == stop:
            return self.store.read(seq, start, stop)
        ring = self.slab.read(seq, stored, stop)
        return ring if stored == start else torch.cat((self.store.read(seq, start, stored).to(ring.device), ring), dim=1)

    def past(self, seq: int, stop: int, queries: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield keys and values [1, H, n, D] of positions 0 .. stop on the device, in order, from the blocks and then from the
        ring.

        Each piece is valid until the next is requested.

        queries: number of queries that will attend to them.
        """
        stored, device = self.stored(seq, stop), self.slab.data.device
        blocks = self.streams.prefetcher.blocks(self.store, seq, stored, device, self.store.arriving, queries=queries)
        ring = [self.slab.read(seq, stored, stop)] if stored < stop else []
        return ((rows[None, :, :, 0], rows[None, :, :, 1]) for rows in chain(blocks, ring))

    def refill(self, seq: int, start: int, stop: int) -> None:
        """Copy positions start .. stop from the store back into the ring; only those in the store."""
        stop = min(stop, self.store.length(seq))
        if start < stop:
            self.slab.write(seq, start, self.store.read(seq, start, stop))

    def reorder(self, sequences: Sequence[int]) -> None:
        """Replace sequence i by the former sequence sequences[i]."""
        self.store.reorder(sequences)
        self._latest = {i: self._latest[seq] for i, seq in enumerate(sequences) if seq in self._latest}

    def ahead(self, seq: int, start: int) -> bool:
        """Return whether decoded tokens were offloaded that are still in a ring that begins at `start`."""
        latest = self._latest.get(seq)
        return latest is not None and start < latest[1] == self.store.length(seq)

    def marks(self) -> tuple[list[int], dict[int, tuple[int, int]]]:
        """Return each sequence's watermark, for rewind()."""
        return [self.store.length(seq) for seq in range(self.store.seqs)], dict(self._latest)

    def rewind(self, marks: tuple[list[int], dict[int, tuple[int, int]]]) -> None:
        """Drop the rows that were offloaded since `marks`."""
        lengths, latest = marks
        for seq, length in enumerate(lengths):
            self.truncate(seq, length)
        self._latest = dict(latest)

    def undo(self, seq: int) -> None:
        """Drop the rows of the latest copy from a ring."""
        self.truncate(seq, self._latest[seq][0])

    def truncate(self, seq: int, length: int) -> None:
        """Drop rows >= length of a sequence."""
        self._latest.pop(seq, None)
        if self.store.length(seq) > length:
            self.store.truncate(seq, length)


def copied(past: Iterable[tuple[Tensor, Tensor]], rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Copy keys and values [1, H, n, D] to rows [H, m, 2, D], piece by piece, and yield each piece."""
    at = 0
    for keys, values in past:
        end = at + keys.shape[2]
        rows[:, at:end, 0], rows[:, at:end, 1], at = keys[0], values[0], end
        yield keys, values


def offload(offloaders: Sequence[Offloader], spans: Sequence[Span]) -> Tensor:
    """Copy tokens of some sequences, at most one span each, from rings to stores, on the current stream.

    The layers must be of one kind. Returns the tokens for the index, [L, R, H, n, 2, D] on the device. Raises
    HostMemoryError before any layer has changed.
    """
    new = [(seq, stored, stop) for seq, _, stop, stored in spans if stored < stop]
    for each in offloaders:
        each.wait_on_stream()
        for seq, _, stop in new:
            each.store.claim(seq, stop)
    for each in offloaders:
        each.extend(new)
    rows = _copy(offloaders, spans)
    if new and rows.is_cuda:  # a few rows, before the next step writes in their places
        copied = torch.cuda.Event()
        copied.record()
        for each in offloaders:
            each.store.arrive(copied, ordered=True)
    return rows


def offload_prompt(offloaders: Sequence[Offloader], seq: int, past: int, rows: Tensor) -> None:
    """Copy rows [L, H, n, 2, D] of a sequence's prompt, from position `past` on, to the stores of layers of one kind.

    Earlier tokens that are only in rings are copied first. All stores must have equal watermarks; rows below are skipped.
    One copy overlaps later work. Raises HostMemoryError before any store has more rows.
    """
    one, stores, length = offloaders[0], [each.store for each in offloaders], past + rows.shape[2]
    for each in offloaders:
        each.up_to({seq: past})
    stored = one.store.length(seq)
    try:
        with one.streams.beside(rows.device):  # where blocks are written to first
            for store in stores:
                store.claim(seq, length)
    except HostMemoryError:
        for store in stores:
            store.truncate(seq, store.length(seq))
        raise
    slabs, spans = [own[None] for own in rows], [(0, length, length, stored)]
    how: dict[str, Any] = {"sink": 0, "ring": length, "past": past, "format": one.store.format}
    none = rows.new_empty((len(rows), 1, rows.shape[1], 0, *rows.shape[3:]))  # an index takes them where they are
    by_kernel = one.on_gpu and rows[0].nbytes % 16 == 0  # which reads 16 bytes at once
    if by_kernel:
        write((store.on_device.changes(store, rows.device) for store in stores), rows.device)
    tables = [store.table_on(rows.device)[seq : seq + 1] for store in stores] if by_kernel else []
    with one.streams.offloading(stores, rows):
        if by_kernel:
            freeze(slabs, tables, one.store.block_size, spans, none, **how)
        else:
            blocks = [[[block.data for block in store.blocks(seq)]] for store in stores]
            freeze_definition(slabs, blocks, one.store.block_size, spans, none, **how)
    for store in stores:
        store.extend(seq, length)


def _copy(offloaders: Sequence[Offloader], spans: Sequence[Span]) -> Tensor:
    """Launch the copy of offload(). The stores have space already."""
    slabs, stores, one = [each.slab.data for each in offloaders], [each.store for each in offloaders], offloaders[0]
    heads, tail, n = slabs[0].shape[1], slabs[0].shape[3:], max(stop - start for _, start, stop, _ in spans)
    rows = slabs[0].new_empty((len(slabs), len(spans), heads, n, *tail))
    how: dict[str, Any] = {"sink": one.slab.regions.sink, "ring": one.slab.regions.ring, "format": one.store.format}
    if one.on_gpu:
        tables = [store.table_on(rows.device) for store in stores]
        freeze(slabs, tables, one.store.block_size, spans, rows, **how)
    else:
        blocks = [[[block.data for block in store.blocks(seq)] for seq in range(store.seqs)] for store in stores]
        freeze_definition(slabs, blocks, one.store.block_size, spans, rows, **how)
    return rows
