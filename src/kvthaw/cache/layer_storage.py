"""The rows of one layer: sink and ring on the device, and its store of blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from kvthaw.cache.device_memory import DeviceBlocks
from kvthaw.cache.host import HostStore, follow
from kvthaw.cache.layer_base import LayerState
from kvthaw.cache.placement import Placement
from kvthaw.cache.pool import Slab
from kvthaw.cache.step import Moves, Row
from kvthaw.cache.streams import Streams
from kvthaw.errors import HostMemoryError
from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.freeze import Span, freeze
from kvthaw.kernels.freeze import definition as freeze_definition


class LayerStorage:
    """Slab and store of one layer, kept consistent.

    The store's length is a watermark: adding tokens below it again does nothing.

    placement: None if all blocks lie on the host.
    tabled: whether kernels find rows through the block table.
    latest: by sequence, the rows before and after the latest copy from its ring.
    """

    def __init__(self, store: HostStore, slab: Slab, streams: Streams) -> None:
        self.store, self.slab, self.streams = store, slab, streams
        self.placement: Placement | None = None
        self.tabled = False
        self.latest: dict[int, tuple[int, int]] = {}
        if self.on_gpu:  # compiled now, which takes a third of a second: no step should wait for that
            streams.deferred.once(("freeze", self.kind), lambda: _copy([self], [(0, 0, 0, 0)]))

    @property
    def on_gpu(self) -> bool:
        """Whether a kernel copies the tokens that leave the ring."""
        return HAS_TRITON and self.slab.data.is_cuda and self.store.pinned

    @property
    def kind(self) -> Hashable:
        """Properties that layers must share for one kernel to copy their rows."""
        data = self.slab.data
        return data.shape, data.dtype, data.device, self.slab.regions, self.store.kind

    def lends(self, other: LayerStorage) -> bool:
        """Return whether another layer's store can share these blocks. Their form is equal, and what the host reads lies there."""
        mine, its = self.store, other.store
        alike = (mine.kind, mine.format) == (its.kind, its.format)
        return alike and (self.placement is None or other.placement is not None)

    def place_on_device(self, layer: int) -> None:
        """Place blocks on the device while the layer's share of device memory has room."""
        memory, store = self.streams.device, self.store
        memory.resolve(self.slab.data.device)
        if memory.bytes:
            store.device = DeviceBlocks(memory, layer, store.shape, store.format.stored, self.slab.data.device)
            store.crossed = torch.zeros_like(store.crossed, device=self.slab.data.device)
            self.placement = Placement(store, store.device, self.streams)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that a captured step reads and writes."""
        table = self.store.table
        in_blocks = [table.addresses, table.on_host, self.store.crossed] if self.tabled and table.addresses.numel() else []
        return [*self.slab.tensors(), *in_blocks]

    # Rows of sink, ring and store

    def read(self, seq: int, start: int, stop: int) -> Tensor:
        """Return rows [H, stop - start, 2, D] of a sequence, from store and ring, on the host or on the device."""
        self.store.wait()
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
        blocks = self.streams.prefetcher.blocks(self.store, seq, stored, device, queries=queries)
        ring = [self.slab.read(seq, stored, stop)] if stored < stop else []
        return ((rows[None, :, :, 0], rows[None, :, :, 1]) for rows in chain(blocks, ring))

    def refill(self, seq: int, start: int, stop: int) -> None:
        """Copy positions start .. stop from the store back into the ring; only those in the store."""
        stop = min(stop, self.store.length(seq))
        if start < stop:
            self.slab.write(seq, start, self.store.read(seq, start, stop))

    def stored(self, seq: int, stop: int) -> int:
        """Return the first position below `stop` that is not offloaded yet."""
        return min(self.store.length(seq), stop)

    def up_to(self, positions: Mapping[int, int]) -> None:
        """Offload each sequence's tokens up to a position that are only in sink or ring."""
        spans = [(seq, stop, stop, stored) for seq, stop in positions.items() if (stored := self.stored(seq, stop)) < stop]
        if spans:
            offload([self], spans)

    def ahead(self, seq: int, start: int) -> bool:
        """Return whether decoded tokens were offloaded that are still in a ring that begins at `start`."""
        latest = self.latest.get(seq)
        return latest is not None and start < latest[1] == self.store.length(seq)

    def marks(self) -> tuple[list[int], dict[int, tuple[int, int]]]:
        """Return each sequence's watermark, for rewind()."""
        return [self.store.length(seq) for seq in range(self.store.seqs)], dict(self.latest)

    def rewind(self, marks: tuple[list[int], dict[int, tuple[int, int]]]) -> None:
        """Drop the rows that were offloaded since `marks`."""
        lengths, latest = marks
        for seq, length in enumerate(lengths):
            self.truncate(seq, length)
        self.latest = dict(latest)

    def truncate(self, seq: int, length: int) -> None:
        """Drop rows >= length of a sequence. At length 0, free blocks that a failed step allocated, too."""
        self.latest.pop(seq, None)
        if self.store.length(seq) > length or (not length and self.store.reserved(seq)):
            self.store.truncate(seq, length)

    def order(self) -> None:
        """Make the current stream wait for all copies, before the device reads the store. The host does not wait."""
        self.store.order(self.slab.data.device)

    def table(self) -> Tensor:
        """Return the current block table on the device, which then waits for all copies."""
        self.order()
        return self.store.table.on(self.slab.data.device)

    # Between steps

    def make_room(self, capacity: int, fixed: Callable[[], int]) -> None:
        """Allocate for `capacity` tokens per sequence. Until capacity grows, no tensor that a step reads moves.

        fixed: returns the bytes of slab and index.
        """
        if self.tabled:
            self.store.table.make_room(capacity, self.slab.data.device)
        if self.placement is not None:
            self.placement.make_room(capacity, fixed())

    def update_table(self) -> None:
        """Copy the addresses of new blocks to the device, which then waits for their rows."""
        if self.tabled:
            self.order()
            self.follow_blocks()

    def follow_blocks(self) -> None:
        """Copy the addresses of new blocks to the device. Their rows may still be in transfer."""
        if self.tabled:
            self.store.table.on(self.slab.data.device)
            if self.placement is not None:
                self.placement.device.memory.spills |= self.store.table.some_on_host

    def reserve(self, ends: Mapping[int, int]) -> None:
        """Allocate the blocks for offloading up to `ends`, by sequence. Raises HostMemoryError."""
        self.finish_moves()
        self.store.claim([(seq, end) for seq, end in ends.items() if end > self.store.length(seq)])

    def finish_moves(self) -> None:
        """Free the device memory of blocks whose copy to the host is complete."""
        if self.placement is not None:
            self.placement.finish()

    def rollback(self, seq: int, start: int, length: int, *, failed: bool) -> None:
        """Return to the first `length` tokens of a sequence, whose ring begins at `start`.

        failed: a step wrote more; else tokens were only offloaded ahead of a step that did not come.
        """
        ahead = self.ahead(seq, start)
        if failed:
            self.refill(seq, start, length)
        if ahead:
            self.truncate(seq, self.latest[seq][0])
        if failed:
            self.truncate(seq, length)

    def state(self, seq: int) -> LayerState:
        """Return the rows of a sequence where they lie; see LayerKV."""
        length = self.store.length(seq)
        blocks = self.store.blocks(seq)[: -(-length // self.store.block_size)]  # without blocks for coming tokens
        return LayerState([block.share() for block in blocks], length, held=self.slab.held()[seq])

    def load(self, seq: int, state: LayerState, start: int) -> None:
        """Load the rows of a state; see LayerKV. Blocks that have no other owner go to the device while there is room."""
        blocks = [block if self.placement is None else self.placement.brought(block) for block in state.blocks]
        self.store.adopt(seq, blocks, state.stored)
        if state.held is not None:
            self.slab.held()[seq].copy_(state.held)
        else:
            self.slab.write(seq, 0, self.store.read(seq, 0, min(self.slab.regions.sink, state.stored)))
            self.refill(seq, start, state.stored)

    def copy_slots(self, moves: Moves) -> None:
        """Copy sinks, rings and addresses of sequences to empty slots."""
        self.store.table.copy_slots(moves)
        moves.copy(self.slab.held())
        moves.copy(self.slab.tickets)

    def move(self, moves: Moves) -> None:
        """Move sequences to empty slots. Blocks stay where they lie."""
        self.store.move(moves)
        for seq, to in moves.slots.items():
            if seq in self.latest:
                self.latest[to] = self.latest.pop(seq)

    def copy_pool(self, other: LayerStorage) -> None:
        """Copy the slab and the counts of another layer that has rows of the same sequences."""
        for mine, its in zip(self.slab.tensors(), other.slab.tensors(), strict=True):
            mine.copy_(its)
        self.store.crossed.copy_(other.store.crossed)
        self.latest = dict(other.latest)

    def reorder(self, sequences: Sequence[int]) -> None:
        """Replace sequence i by the former sequence sequences[i]."""
        self.store.reorder(sequences)
        self.latest = {i: self.latest[seq] for i, seq in enumerate(sequences) if seq in self.latest}
        self.slab.reorder(torch.tensor(sequences, device=self.slab.data.device))


def copied(past: Iterable[tuple[Tensor, Tensor]], rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Copy keys and values [1, H, n, D] to rows [H, m, 2, D], piece by piece, and yield each piece."""
    at = 0
    for keys, values in past:
        end = at + keys.shape[2]
        rows[:, at:end, 0], rows[:, at:end, 1], at = keys[0], values[0], end
        yield keys, values


def offload(layers: Sequence[LayerStorage], spans: Sequence[Span]) -> Tensor:
    """Copy tokens of some sequences, at most one span each, from rings to stores, on the current stream.

    The layers must be of one kind. Returns the tokens for the index, [L, R, H, n, 2, D] on the device. Raises
    HostMemoryError before any layer has changed.
    """
    new = [(seq, stored, stop) for seq, _, stop, stored in spans if stored < stop]
    ends, latest = [(seq, stop) for seq, _, stop in new], {seq: (start, stop) for seq, start, stop in new}
    for each in layers:
        each.order()
        each.store.claim(ends)
    for each in layers:
        each.store.extend(ends)
        each.latest.update(latest)
    rows = _copy(layers, spans)
    if new and rows.is_cuda:  # a few rows, before the next step writes in their places
        copied = torch.cuda.Event()
        copied.record()
        for each in layers:
            each.store.arrive(copied, ordered=True)
    return rows


def offload_prompts(
    layers: Sequence[LayerStorage], parts: Sequence[Row], rows: Tensor, until: Mapping[int, int] | None = None
) -> None:
    """Copy rows [L, H, n, 2, D], which hold the new tokens of some prompts, to the stores of layers of one kind.

    Earlier tokens that are only in rings are copied first. All stores must have equal watermarks; rows below are skipped.
    One copy overlaps later work. Raises HostMemoryError before any store has more rows.

    parts: the prompts. Their `places` are those in `rows`.
    until: the most tokens that sequences will have, where that is known. While the device has room, a prompt gets the next
        block that it will need too: the device is busy with the prompt, and the host is not.
    """
    one, stores = layers[0], [each.store for each in layers]
    for each in layers:
        each.up_to({part.seq: part.past for part in parts})
    stored, ends = {part.seq: one.store.length(part.seq) for part in parts}, [(part.seq, part.length) for part in parts]
    ahead = [(seq, max(end, min((until or {}).get(seq, 0), end + one.store.block_size))) for seq, end in ends]
    try:
        with one.streams.beside(rows.device):  # where blocks are written to first
            fits = all(store.lacks(ahead) <= store.room for store in stores)  # who plans ahead looks at the first layer alone
            for store in stores:
                store.claim(ahead if fits else ends)
    except HostMemoryError:
        for store in stores:
            for seq, length in stored.items():
                store.truncate(seq, length)
        raise
    slabs, spans = [own[None] for own in rows], [(part.seq, part.length, part.length, stored[part.seq]) for part in parts]
    how: dict[str, Any] = {"sink": 0, "ring": max(part.length for part in parts), "format": one.store.format}
    how["slots"] = [part.start - part.past for part in parts]
    none = rows.new_empty((len(rows), len(parts), rows.shape[1], 0, *rows.shape[3:]))  # an index takes them where they are
    by_kernel = one.on_gpu and rows[0].nbytes % 16 == 0  # which reads 16 bytes at once
    for store in stores:
        store.order(rows.device)  # earlier copies read the tables too
    tables = follow([store.table for store in stores], rows.device) if by_kernel else []
    with one.streams.offloading(stores, rows, *tables):  # a reset may free tables while the kernel has yet to read them
        if by_kernel:
            freeze(slabs, tables, one.store.block_size, spans, none, **how)
        else:
            freeze_definition(slabs, [_blocks(store) for store in stores], one.store.block_size, spans, none, **how)
    for store in stores:
        store.extend(ends)


def _blocks(store: HostStore) -> list[list[Tensor]]:
    """Return the blocks of each sequence of a store."""
    return [[block.data for block in store.blocks(seq)] for seq in range(store.seqs)]


def _copy(layers: Sequence[LayerStorage], spans: Sequence[Span]) -> Tensor:
    """Launch the copy of offload(). The stores have space already."""
    slabs, stores, one = [each.slab.data for each in layers], [each.store for each in layers], layers[0]
    heads, tail, n = slabs[0].shape[1], slabs[0].shape[3:], max(stop - start for _, start, stop, _ in spans)
    rows = slabs[0].new_empty((len(slabs), len(spans), heads, n, *tail))
    how: dict[str, Any] = {"sink": one.slab.regions.sink, "ring": one.slab.regions.ring, "format": one.store.format}
    if one.on_gpu:
        tables = follow([store.table for store in stores], rows.device)
        freeze(slabs, tables, one.store.block_size, spans, rows, **how)
    else:
        freeze_definition(slabs, [_blocks(store) for store in stores], one.store.block_size, spans, rows, **how)
    return rows
