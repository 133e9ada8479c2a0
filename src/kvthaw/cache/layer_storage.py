"""Storage of one layer: sink and ring on the device, its store of blocks, and its index."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from kvthaw.cache.block_table import follow
from kvthaw.cache.device_memory import DeviceBlocks
from kvthaw.cache.host import HostStore
from kvthaw.cache.index_api import RECENT_QUERIES
from kvthaw.cache.index_updater import IndexUpdater
from kvthaw.cache.placement import BlockPreallocator, Placement
from kvthaw.cache.pool import Slab
from kvthaw.cache.state import LayerState
from kvthaw.cache.step import Row, Step
from kvthaw.cache.streams import Streams
from kvthaw.errors import HostMemoryError
from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.freeze import Span, freeze
from kvthaw.kernels.freeze import definition as freeze_definition

_ENGINES = 4096
"""Tokens of a prompt from which copy engines take rows to the host instead of a kernel. They need a copy for each block, and one
for each head of a block in part, but leave the multiprocessors to attention."""
Leaving = tuple[int, int, int]
"""A sequence and the tokens that leave its ring, start .. stop."""


class LayerStorage:
    """Slab, store and index of one layer, kept consistent.

    Store and index have watermarks, the positions up to which they have tokens. Adding tokens again therefore does nothing.

    updater: None for a layer without an index of its own.
    placement: None if all blocks lie on the host.
    """

    def __init__(self, store: HostStore, slab: Slab, streams: Streams, prompt_queries: int | None = RECENT_QUERIES) -> None:
        self.store, self.slab, self.streams, self.prompt_queries = store, slab, streams, prompt_queries
        self.updater: IndexUpdater | None = None
        self.placement: Placement | None = None
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

    def place_on_device(self, layer: int) -> None:
        """Place blocks on the device while the layer's share of device memory has room."""
        memory, blocks = self.streams.device, self.store.allocator
        memory.resolve(self.slab.data.device)
        if memory.bytes:
            blocks.device = DeviceBlocks(memory, layer, blocks.shape, blocks.dtype, self.slab.data.device)
            self.store.crossed = self.store.crossed.to(self.slab.data.device)
            self.placement = Placement(self.store, blocks.device, self.streams)

    @property
    def room(self) -> int:
        """Bytes that the device has left for blocks."""
        return 0 if self.placement is None else max(0, self.placement.device.room)

    def host_need(self, blocks: int) -> int:
        """Return the bytes of host memory for `blocks` more blocks, less the blocks that fit on the device."""
        allocator = self.store.allocator
        return max(0, blocks - self.room // allocator.size) * allocator.held

    def append(
        self, row: Row, queries: Tensor, keys: Tensor, values: Tensor, remaining: int, passed: Tensor | None = None, *,
        paused: bool = False,
    ) -> int:  # fmt: skip
        """Store and index a prompt's tokens [., n, D] of one sequence. Returns where its ring begins afterwards.

        Sink and ring then hold the rows as the store's format rounds them.

        passed: rows of the whole prompt; their last positions are written now.
        queries, remaining, paused: as for index_prompt().
        """
        past, seq, length = row.past, row.seq, row.past + keys.shape[1]
        keys, values = self.store.format.rounded(keys, values)
        rows = torch.stack((keys, values), dim=2)
        if passed is not None:
            passed[:, past:] = rows
        if keys.shape[1] < _ENGINES:
            offload_prompts([self], [replace(row, start=0, stop=keys.shape[1])], rows[None])
        else:
            self.up_to({seq: past})
            shared = self.store.length(seq) - past
            self.streams.offload(self.store, seq, keys[:, shared:], values[:, shared:])
        start = self.index_prompt(row, queries, keys, values, remaining, paused=paused)
        for begin, end in ((past, min(self.slab.regions.sink, length)), (max(start, past), length)):
            if begin < end:
                self.slab.write(seq, begin, rows[:, begin - past : end - past])
        return start

    def index_prompt(
        self, row: Row, queries: Tensor, keys: Tensor, values: Tensor, remaining: int, *, paused: bool = False
    ) -> int:
        """Index a prompt's tokens [., n, D] of one sequence, which are stored. Returns where its ring begins afterwards.

        queries: the last ones.
        remaining: tokens of the prompt that are yet to come.
        paused: steps of other sequences run before the remaining tokens.
        """
        length = row.past + keys.shape[1]
        start = self.slab.regions.first_indexed(length)
        if self.updater is not None and start > self.updater.indexed(row.seq):
            self.updater.prompt(row.seq, start, keys, values, row.past, queries, remaining, paused=paused)
        return start

    def indexes_whole(self, seq: int) -> bool:
        """Return whether an index on the device is built with the last chunk of a prompt, from all of its rows.

        The rows then pass the device for attention, so they need not cross the bus again.
        """
        on_device = self.updater is not None and not self.updater.retriever.index.traits.on_host
        return on_device and self.stale(seq)

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

    def extend(self, spans: Sequence[tuple[int, int, int]]) -> None:
        """Count tokens (sequence, start, stop) that are being copied from the ring to the store, which has space for them."""
        for seq, start, stop in spans:
            self.store.extend(seq, stop)
            self._latest[seq] = start, stop

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

    def truncate(self, seq: int, length: int) -> None:
        """Drop rows >= length of a sequence. At length 0, free blocks that a failed step allocated, too."""
        self._latest.pop(seq, None)
        if self.store.length(seq) > length or (not length and self.store.reserved(seq)):
            self.store.truncate(seq, length)

    def order(self) -> None:
        """Make the current stream wait for all copies, before the device reads the store. The host does not wait."""
        self.store.order(self.slab.data.device)

    # Between steps

    def lacking(self, leaving: Sequence[Leaving]) -> list[Span]:
        """Return the spans of leaving tokens that the index or the store lacks. Stale sequences are left out."""
        spans: list[Span] = []
        for seq, start, stop in leaving:
            given = self.updater is None or self.updater.indexed(seq) >= stop
            stored = self.stored(seq, stop)
            if not (given and stored == stop) and not self.stale(seq):
                spans.append((seq, stop if given else start, stop, stored))
        return spans

    def stale(self, seq: int) -> bool:
        """Return whether a sequence must be indexed again."""
        return self.updater is not None and self.updater.is_stale(seq)

    def trim_queries(self, recent_queries: dict[int, Tensor], idle: Collection[int]) -> None:
        """Free the early queries of indexed prompts, if the method kept all of them until then."""
        for seq, known in recent_queries.items() if self.prompt_queries is None else ():
            indexed = self.updater is not None and self.updater.indexed(seq) > self.updater.first
            if indexed and seq not in idle and known.shape[1] > RECENT_QUERIES:
                recent_queries[seq] = known[:, -RECENT_QUERIES:].clone()

    def reserve(self, ends: Mapping[int, int]) -> None:
        """Allocate the blocks for offloading up to `ends`, by sequence. Raises HostMemoryError."""
        self.finish_moves()
        for seq, end in ends.items():
            if end > self.store.length(seq):
                self.store.claim(seq, end)

    def finish_moves(self) -> None:
        """Free the device memory of blocks whose copy to the host is complete."""
        if self.placement is not None:
            self.placement.finish()

    def preallocate(self, seq: int, length: int, most: int, preallocator: BlockPreallocator) -> None:
        """Allocate the next block of a sequence, or make room for it on the device, if it needs the block before its next
        turn.

        Does nothing on a full device while other sequences hold blocks there ahead: the sequence takes one of these.

        length: the sequence's tokens.
        most: the tokens that it will have at most.
        """
        allocator = self.store.allocator
        needs = self.store.reserved(seq) < most and seq not in allocator.ahead and not allocator.takes_from_others()
        due = needs and preallocator.due(self.store, self.slab.regions, seq, length)
        if self.placement is not None:
            self.placement.balance(int(due), None if self.updater is None else self.updater.retriever.recalled)
        if due and (self.placement is None or not self.placement.spilling):
            preallocator.take(self.store, seq)

    def wait(self) -> None:
        """Wait until every token is offloaded and indexed. Raises the error of any job that failed."""
        self.store.wait()
        if self.updater is not None:
            self.updater.retriever.wait()

    def rollback(self, seq: int, start: int, length: int, failed: Step | None) -> None:
        """Return to the first `length` tokens of a sequence, whose ring begins at `start`.

        failed: the step that wrote more; None: tokens were only offloaded and indexed ahead of a step that did not come.
        """
        ahead = self.ahead(seq, start)
        if failed is None and not ahead and (self.updater is None or self.updater.indexed(seq) <= start):
            return
        self.store.wait()
        if self.updater is not None:
            self.updater.rollback(seq, start)
        if failed is not None:
            self.refill(seq, start, length)
        if ahead:
            self.truncate(seq, self._latest[seq][0])
        if failed is not None:
            self.truncate(seq, length)

    def crop(self, seq: int, start: int, length: int, old: int, before: int, *, exactly: bool = False) -> None:
        """Drop the tokens >= length of a sequence of `before` tokens. The ring is refilled from the store.

        start: where its ring begins afterwards.
        old: where its ring began before.
        exactly: see LayerKV.
        """
        self.wait()
        if start < old and self.updater is not None:
            (self.updater.rollback if exactly else self.updater.truncate)(seq, start)
        self.refill(seq, start, min(old, length, before))
        self.truncate(seq, length)

    def clear(self, seq: int) -> None:
        """Drop a sequence."""
        if self.store.length(seq):
            self.store.wait()
        if self.updater is not None:
            self.updater.clear(seq)
        self.truncate(seq, 0)

    def export(self, seq: int, queries: Tensor | None) -> LayerState:
        """Copy a sequence and the last queries of its prompt to host memory; see LayerKV."""
        self.wait()
        held = self.slab.held()[seq].to("cpu", copy=True)
        queries = None if queries is None else queries.cpu()
        index = None if self.updater is None else self.updater.export(seq)
        blocks = self.store.export(seq)
        if self.placement is not None:
            self.placement.moved_bytes += sum(block.data.nbytes for block in self.store.blocks(seq) if block.on_device)
        return LayerState(blocks, self.store.length(seq), held=held, queries=queries, index=index)

    def load(self, seq: int, state: LayerState, start: int) -> None:
        """Load a state; see LayerKV. Blocks that have no other owner go to the device while there is room."""
        blocks = [block if self.placement is None else self.placement.brought(block) for block in state.blocks]
        self.store.adopt(seq, blocks, state.stored)
        if state.held is not None:
            self.slab.held()[seq].copy_(state.held)
            start = start if state.index is None else state.index.end  # it may have run ahead
        else:
            self.slab.write(seq, 0, self.store.read(seq, 0, min(self.slab.regions.sink, state.stored)))
            self.refill(seq, start, state.stored)
        if self.updater is not None:
            self.updater.load(seq, start, state.index)

    def reorder(self, sequences: Sequence[int]) -> None:
        """Replace sequence i by the former sequence sequences[i]."""
        self.wait()
        if self.updater is not None:
            self.updater.reorder(sequences)
        self.store.reorder(sequences)
        self._latest = {i: self._latest[seq] for i, seq in enumerate(sequences) if seq in self._latest}
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
    for each in layers:
        each.order()
        for seq, _, stop in new:
            each.store.claim(seq, stop)
    for each in layers:
        each.extend(new)
    rows = _copy(layers, spans)
    if new and rows.is_cuda:  # a few rows, before the next step writes in their places
        copied = torch.cuda.Event()
        copied.record()
        for each in layers:
            each.store.arrive(copied, ordered=True)
    return rows


def offload_prompts(layers: Sequence[LayerStorage], parts: Sequence[Row], rows: Tensor) -> None:
    """Copy rows [L, H, n, 2, D], which hold the new tokens of some prompts, to the stores of layers of one kind.

    Earlier tokens that are only in rings are copied first. All stores must have equal watermarks; rows below are skipped.
    One copy overlaps later work. Raises HostMemoryError before any store has more rows.

    parts: the prompts. Their `places` are those in `rows`.
    """
    one, stores = layers[0], [each.store for each in layers]
    for each in layers:
        each.up_to({part.seq: part.past for part in parts})
    stored = {part.seq: one.store.length(part.seq) for part in parts}
    try:
        with one.streams.beside(rows.device):  # where blocks are written to first
            for store in stores:
                for part in parts:
                    store.claim(part.seq, part.length)
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
    tables = follow([store.table for store in stores], rows.device) if by_kernel else []
    with one.streams.offloading(stores, rows, *tables):  # a reset may free tables while the kernel has yet to read them
        if by_kernel:
            freeze(slabs, tables, one.store.block_size, spans, none, **how)
        else:
            freeze_definition(slabs, [_blocks(store) for store in stores], one.store.block_size, spans, none, **how)
    for store in stores:
        for part in parts:
            store.extend(part.seq, part.length)


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
