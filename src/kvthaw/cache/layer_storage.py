"""Storage of one layer: sink and ring on the device, its store of blocks, and its index."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvthaw.cache.device_memory import DeviceBlocks
from kvthaw.cache.host import HostStore
from kvthaw.cache.index_api import RECENT_QUERIES
from kvthaw.cache.index_updater import IndexUpdater
from kvthaw.cache.offloader import Offloader
from kvthaw.cache.placement import BlockPreallocator, Placement
from kvthaw.cache.plan import Plan, Settings
from kvthaw.cache.pool import Slab
from kvthaw.cache.state import LayerState
from kvthaw.cache.step import Row, Step
from kvthaw.cache.streams import Streams
from kvthaw.kernels.freeze import Span
from kvthaw.kernels.row_format import row_format

Leaving = tuple[int, int, int]
"""A sequence and the tokens that leave its ring, start .. stop."""


class LayerStorage:
    """Slab, store and index of one layer, kept consistent.

    Store and index have watermarks, the positions up to which they have tokens. Adding tokens again therefore does nothing.

    updater: None for a layer without an index of its own.
    placement: None if all blocks lie on the host.
    """

    def __init__(self, count: int, key: Tensor, plan: Plan, settings: Settings, streams: Streams) -> None:
        """Allocate for `count` sequences, with the heads, head_dim, dtype and device of key [., H, T, D]."""
        method, device, (_, heads, _, dim) = settings.method, key.device, key.shape
        pinned, memory = device.type == "cuda", streams.memory
        how: dict[str, Any] = {"block_size": settings.block_size, "pinned": pinned, "memory": memory}
        self.store = HostStore(count, heads, dim, key.dtype, format=row_format(settings.kv_dtype, dim, key.dtype), **how)
        self.slab = Slab(count, heads, dim, plan.regions, method.slots(plan.rows), dtype=key.dtype, device=device)
        self.streams, self.prompt_queries = streams, method.prompt_queries
        self.updater: IndexUpdater | None = None
        self.placement: Placement | None = None
        self.offloader = Offloader(self.store, self.slab, streams)

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
        regions, past, seq = self.slab.regions, row.past, row.seq
        length = past + keys.shape[1]
        keys, values = self.store.format.rounded(keys, values)
        if passed is not None:
            passed[:, past:, 0], passed[:, past:, 1] = keys, values
        self.offloader.prompt(seq, past, keys, values)
        start = self.index_prompt(row, queries, keys, values, remaining, paused=paused)
        sink = max(0, min(regions.sink, length) - past)
        if sink:
            self.slab.write(seq, past, torch.stack((keys[:, :sink], values[:, :sink]), dim=2))
        ring = max(start, past)
        if ring < length:
            self.slab.write(seq, ring, torch.stack((keys[:, ring - past :], values[:, ring - past :]), dim=2))
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

    def index_ahead(self, ends: Mapping[int, int], recent_queries: Mapping[int, Tensor], passed: Mapping[int, Tensor]) -> None:
        """Start to build indexes of prompts; see IndexUpdater.begin.

        An index on the host is built concurrently with the following layers, an index on the device from the rows in
        `passed`.
        """
        if self.updater is not None:
            self.updater.begin(ends, recent_queries, passed)

    def lacking(self, leaving: Sequence[Leaving]) -> list[Span]:
        """Return the spans of leaving tokens that the index or the store lacks. Stale sequences are left out."""
        spans: list[Span] = []
        for seq, start, stop in leaving:
            given = self.updater is None or self.updater.indexed(seq) >= stop
            stored = self.offloader.stored(seq, stop)
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

    def undisturbed(self, leaving: Sequence[Sequence[tuple[int, int, int]]]) -> int:
        """Return how many of the next tokens come before the index changes.

        leaving: the tokens that leave the rings before each token.
        """
        updater = self.updater
        if updater is not None and updater.stale:
            return 0
        changes = (any(updater is None or updater.indexed(seq) < stop for seq, _, stop in before) for before in leaving)
        return next((t for t, changed in enumerate(changes) if changed), len(leaving))

    def reserve(self, ends: Mapping[int, int]) -> None:
        """Allocate the blocks for offloading up to `ends`, by sequence. Raises HostMemoryError."""
        self.finish_moves()
        for seq, end in ends.items():
            if end > self.store.length(seq):
                self.store.claim(seq, end)

    @property
    def moved_bytes(self) -> int:
        """Bytes of blocks moved between device and host so far."""
        return 0 if self.placement is None else self.placement.moved_bytes

    def finish_moves(self) -> None:
        """Free the device memory of blocks whose copy to the host is complete."""
        if self.placement is not None:
            self.placement.finish()

    def preallocate(self, seq: int, length: int, preallocator: BlockPreallocator) -> None:
        """Allocate the next block of a sequence, or make room for it on the device, if it needs the block before its next
        turn.

        length: the sequence's tokens.
        """
        due = seq not in self.store.allocator.ahead and preallocator.due(self.store, self.slab.regions, seq, length)
        if self.placement is not None:
            self.placement.balance(int(due), None if self.updater is None else self.updater.retriever.recalled)
        if due and (self.placement is None or not self.placement.spilling):
            preallocator.take(self.store, seq)

    def wait(self) -> None:
        """Wait until every token is offloaded and indexed. Raises the error of any job that failed."""
        self.offloader.wait()
        if self.updater is not None:
            self.updater.retriever.wait()

    def rollback(self, seq: int, start: int, length: int, failed: Step | None) -> None:
        """Return to the first `length` tokens of a sequence, whose ring begins at `start`.

        failed: the step that wrote more; None: tokens were only offloaded and indexed ahead of a step that did not come.
        """
        ahead = self.offloader.ahead(seq, start)
        if failed is None and not ahead and (self.updater is None or self.updater.indexed(seq) <= start):
            return
        self.offloader.wait()
        if self.updater is not None:
            self.updater.rollback(seq, start)
        if failed is not None:
            self.offloader.refill(seq, start, length)
        if ahead:
            self.offloader.undo(seq)
        if failed is not None:
            self.offloader.truncate(seq, length)

    def crop(self, seq: int, start: int, length: int, old: int, before: int, *, exactly: bool = False) -> None:
        """Drop the tokens >= length of a sequence of `before` tokens. The ring is refilled from the store.

        start: where its ring begins afterwards.
        old: where its ring began before.
        exactly: see LayerKV.
        """
        self.wait()
        if start < old and self.updater is not None:
            (self.updater.rollback if exactly else self.updater.truncate)(seq, start)
        self.offloader.refill(seq, start, min(old, length, before))
        self.offloader.truncate(seq, length)

    def clear(self, seq: int) -> None:
        """Drop a sequence."""
        if self.store.length(seq):
            self.offloader.wait()
        if self.updater is not None:
            self.updater.clear(seq)
        self.offloader.truncate(seq, 0)

    def export(self, seq: int, queries: Tensor | None) -> LayerState:
        """Copy a sequence and the last queries of its prompt to host memory; see LayerKV."""
        self.wait()
        held = self.slab.data[seq, :, : self.slab.pool_start].to("cpu", copy=True)
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
            self.slab.data[seq, :, : self.slab.pool_start].copy_(state.held)
            start = start if state.index is None else state.index.end  # it may have run ahead
        else:
            self.slab.write(seq, 0, self.store.read(seq, 0, min(self.slab.regions.sink, state.stored)))
            self.offloader.refill(seq, start, state.stored)
        if self.updater is not None:
            self.updater.load(seq, start, state.index)

    def bring(self, seq: int) -> None:
        """Start to copy the full blocks of a sequence to the device while there is room."""
        if self.placement is not None:
            self.placement.bring(self.store.blocks(seq)[: self.store.length(seq) // self.store.block_size])

    def reorder(self, sequences: Sequence[int]) -> None:
        """Replace sequence i by the former sequence sequences[i]."""
        self.wait()
        if self.updater is not None:
            self.updater.reorder(sequences)
        self.offloader.reorder(sequences)
        self.slab.reorder(torch.tensor(sequences, device=self.slab.data.device))
