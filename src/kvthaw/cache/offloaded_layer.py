"""One attention layer with offloaded KV: how a new token is stored, and what a query attends to. Read this file first.

A decode step, start to finish:

    ring full?            its oldest tokens are offloaded and indexed: they join the retrieval region
    query    -> index     -> rows -> residency: which of them are on the device already?
             -> transfer fetches the others
             -> attention: new K, V enter the ring; the query attends to sink + ring + selected rows
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor

from kvthaw.cache.host import HostStore
from kvthaw.cache.host_memory import HostMemory
from kvthaw.cache.index_api import IndexContext, Rotary
from kvthaw.cache.layer_base import AttentionParams, LayerKV, LayerShape, LayerState, PrefillKV, RecentQueries, attend_rows
from kvthaw.cache.layer_storage import LayerStorage, copied
from kvthaw.cache.plan import Plan, Settings
from kvthaw.cache.pool import Slab
from kvthaw.cache.sequences import Sequences
from kvthaw.cache.sparse_attention import HeldAttention, make_attention
from kvthaw.cache.step import Moves, Row, Step
from kvthaw.cache.streams import Streams
from kvthaw.kernels.places import Newest
from kvthaw.kernels.row_format import row_format
from kvthaw.regions import Regions


class OffloadedLayer(LayerKV):
    """KV of one layer: sink, ring and fetched rows in a slab on the device, all rows in a store of blocks; see LayerKV.

    Store and index have watermarks, the positions up to which they have tokens. Adding tokens again therefore does nothing.
    Before the first prompt, slab and store have no sequences.

    leader: the anchor whose index and selections this layer follows; None: it has its own.
    sparse: its decode steps.
    storage: `store` has all rows; `slab` has sink, ring and fetched rows.
    retriever: selects rows; None for a method that retrieves nothing. `own`: the same if this layer's index is in it.
    updater: feeds the index; None for a layer without an index of its own.
    on_host: whether the index works on the host, concurrently with the device.
    rotary: for a method that asks for it.
    plan: the sizes; None before the first prompt.
    room: tokens per sequence that there is device memory for.
    asked_again: decode steps with another layer's queries.
    unchecked: whether the host has not read if the latest prompts were finite.
    """

    plan: Plan | None = None
    rotary: Rotary | None = None

    def __init__(
        self, number: int, settings: Settings, streams: Streams, sequences: Sequences, leader: OffloadedLayer | None = None
    ) -> None:
        self.number, self.settings, self.streams, self.sequences, self.leader = number, settings, streams, sequences, leader
        self.reset()

    def reset(self) -> None:
        if self.plan is not None:
            self.drop_search()
        none = Slab(0, 0, 0, Regions(0, 1, 1), 0, dtype=torch.float32, device=torch.device("cpu"))
        self._use(HeldAttention(LayerStorage(HostStore(0, 0, 0, torch.float32), none, self.streams), self.sequences))
        self.plan, self.room, self.scale, self.asked_again = None, 0, 0.0, 0
        self.recent_queries = RecentQueries(self.settings.method.prompt_queries)
        self._taken: tuple[Step | None, int] = None, 0  # a decode step, and how many of its tokens came
        self._again: tuple[Step | None, int] = None, 0  # the last step whose queries came again, and asked_again before it
        self.unchecked = False

    def _use(self, sparse: HeldAttention) -> None:
        """Attend by `sparse`, and hold its parts."""
        self.sparse, self.storage, self.store, self.slab = sparse, sparse.storage, sparse.storage.store, sparse.storage.slab
        self.retriever, self.updater = sparse.retriever, sparse.updater
        self.own = None if sparse.updater is None else sparse.retriever
        self.on_host = sparse.retriever is not None and sparse.retriever.index.traits.on_host

    def length(self, seq: int) -> int:
        step, taken = self._taken
        under_way = step is not None and step is self.sequences.step and not step.parts
        return step.lengths(taken)[seq] if step is not None and under_way else self.sequences.length(seq)

    def indexed(self, seq: int) -> int:
        """Return where the ring begins: positions from the end of the sink to here are in the retrieval region."""
        return self.sequences.indexed(seq, self.length(seq))

    def read(self, seq: int, start: int, stop: int) -> Tensor:
        return self.storage.read(seq, start, stop)

    def nonfinite(self) -> Tensor | None:
        return self.slab.tickets[:, 0] if self.plan else None

    def device_bytes(self) -> int:
        """Return the bytes of KV on the device: sink, ring, pool and blocks."""
        return self.slab.data.nbytes + self.store.nbytes(on_device=True)

    def fixed_bytes(self) -> int:
        """Return the bytes on the device apart from blocks: the slab, and a selecting layer's index without rotary tables."""
        data, own = self.slab.data, self.own
        if own is None:
            return data.nbytes
        tensors, rotary = [*self.tensors(), *own.residency.tensors()], own.context.rotary
        shared = [] if rotary is None else [id(rotary.cos), id(rotary.sin)]
        return sum({id(x): x.nbytes for x in tensors if id(x) not in shared and x.device == data.device}.values())

    def host_bytes(self, seq: int | None = None) -> int:
        return self.store.nbytes(seq) if self.plan else 0

    def tensors(self) -> list[Tensor]:
        if self.plan is None:
            return []
        return self.storage.tensors() + ([] if self.retriever is None else self.retriever.tensors())

    # Prompts

    def allocate(self, step: Step, query: Tensor, key: Tensor, scale: float) -> None:
        """Create slab, store, index and attention, sized by the first tokens: query [., Hq, T, D], key [., H, T, D]."""
        self._allocate(self._sizes(step), len(step.left_pad), query, key, scale)

    def _allocate(self, plan: Plan, seqs: int, query: Tensor, key: Tensor, scale: float) -> None:
        settings, (_, heads, _, dim) = self.settings, key.shape
        slots, block_size = settings.method.slots(plan.rows), settings.block_size
        how: dict[str, Any] = {"memory": self.streams.memory, "format": row_format(settings.kv_dtype, dim, key.dtype)}

        def make() -> None:
            slab = Slab(seqs, heads, dim, plan.regions, slots, dtype=key.dtype, device=key.device)
            store = HostStore(seqs, heads, dim, key.dtype, block_size=block_size, pinned=key.is_cuda, **how)
            self.scale = scale
            self._use(self._attention(LayerStorage(store, slab, self.streams), plan, query, key))
            self.plan = plan
            self._make_room()

        self.streams.device.allocate(key.device, make)
        self.streams.device.fixed[self.number] = self.fixed_bytes()

    def _sizes(self, step: Step) -> Plan:
        return self.settings.plan(step.longest, self.sequences.limit)

    def _attention(self, storage: LayerStorage, plan: Plan, query: Tensor, key: Tensor) -> HeldAttention:
        """Create the layer's attention, and its index unless it follows another layer."""
        context = IndexContext(
            self.number, query.shape[1], key.shape[1], key.shape[3], key.dtype, key.device, storage.store, plan.regions,
            self.scale, seed=self.settings.seed, rows=plan.rows, slab=storage.slab, sequences=self.sequences,
            aux=self.streams.aux, deferred=self.streams.deferred, rotary=self.rotary, ranks=self.settings.ranks,
        )  # fmt: skip
        leader = None if self.leader is None else self.leader.retriever
        return make_attention(self.settings.method, storage, context, self.sequences, self.recent_queries, leader)

    def prefill(
        self, step: Step, query: Tensor, key: Tensor, value: Tensor, attention: AttentionParams
    ) -> tuple[Tensor, PrefillKV]:
        self.drop_search()
        if self.plan is None:
            self.allocate(step, query, key, attention.scale)
        passed = dict[int, Tensor]()
        out = self._attend_dense(step, query, key, value, attention, passed if self.sequences.ends_with(step) else None)
        return out, self.append(step, query, key, value, passed)

    def _attend_dense(
        self, step: Step, query: Tensor, key: Tensor, value: Tensor, attention: AttentionParams,
        passed: dict[int, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend causally and exactly to all earlier tokens and the new ones.

        passed: receives the rows [H, n, 2, D] of sequences whose index is built with this step, with space for the new
            rows. See IndexUpdater.takes_whole. Where they take too much memory, kvthaw reads them again after the step.
        """
        if step.start == 0 and (len(step.parts) == 1 or not (step.parts or any(step.left_pad))):
            return attention.causal(query, key, value)
        if step.packs(query.shape[2]):
            return attention.packed(query, key, value, step)

        def attend(row: Row, q: Tensor) -> Tensor:
            k, v = (x[row.row : row.row + 1, :, row.places] for x in (key, value))
            if row.past == 0:
                return attention.causal(q, k, v)
            past = self.storage.past(row.seq, row.past, q.shape[2])
            shape = k.shape[1], row.past + k.shape[2], 2, k.shape[3]
            whole = self.updater is not None and self.updater.takes_whole(row.seq)
            if passed is not None and whole and self.streams.device.keeps(math.prod(shape) * k.itemsize, k.device):
                passed[row.seq] = k.new_empty(shape)
                past = copied(past, passed[row.seq])
            return attention.continued(q, k, v, past)

        return attend_rows(step, query, attend)

    def append(
        self, step: Step, query: Tensor, key: Tensor, value: Tensor, passed: Mapping[int, Tensor] = MappingProxyType({})
    ) -> PrefillKV:
        return PrefillKV(step, key, value, self.recent_queries.take(step, query), passed)

    def prepare(self, step: Step, shape: LayerShape) -> None:
        if self.plan is None:
            self.allocate(step, shape.queries, shape.keys, shape.scale)
        self.recent_queries.begin(step)
        if self.updater is not None:
            self.updater.begin({}, {})  # no prompt has ended

    def begin(self, step: Step, shape: LayerShape, states: Mapping[int, LayerState]) -> None:
        super().begin(step, shape, states)
        placement, store = self.storage.placement, self.store
        if placement is not None and not step.parts:  # else other sequences wait for steps, and blocks go one by one
            for row in step.rows():
                placement.bring(store.blocks(row.seq)[: store.length(row.seq) // store.block_size])

    # Decoding

    def decode(self, step: Step, t: int, query: Tensor, newest: Newest, attention: AttentionParams) -> Tensor:
        if t == 0 and (own := self.own) is not None:
            own.choices.clear()
        self._taken = step, t + 1
        return self._attend(step, t, query, newest, attention)

    def attend_again(self, step: Step, query: Tensor, key: Tensor, value: Tensor, attention: AttentionParams) -> Tensor:
        if step.dense:
            return self._attend_dense(step, query, key, value, attention)
        if self._again[0] is not step:
            self._again = step, self.asked_again
        self.asked_again += 1
        self.sequences.place_again(step, self.slab.data.device)
        out = self._attend(None, 0, query[:, :, 0], (key[:, :, 0], value[:, :, 0]), attention)
        if self.own is not None:
            self.own.asked_again += self.sequences.count - len(self.sequences.idle)
        return out[:, :, None]

    def _attend(self, step: Step | None, t: int, query: Tensor, newest: Newest, attention: AttentionParams) -> Tensor:
        out, choice = self.sparse.attend(step, t, query, newest, attention)
        for observer in self.streams.observers:
            observer(self, query, choice)
        return out

    def drop_search(self) -> None:
        """Drop the predicted queries and their searches, because the step does not come."""
        if self.own is not None:
            self.own.drop_predicted()

    # Between steps

    @property
    def can_run_ahead(self) -> bool:
        """Whether rollback() undoes run_ahead() exactly. A tree on the host that drops the tokens may have another shape."""
        if self.on_host:
            return not self.asked_again
        return self.own is None or self.own.index.reversible

    def before_step(self) -> None:
        """Prepare for the next step; see LayerKV. If the index is graph-safe, one token then runs on the device alone."""
        if self.updater is not None:
            self.updater.trim_queries()
        self.storage.order()
        self.grow()
        if self.retriever is not None and not self.on_host:
            self.retriever.wait()
        self.storage.update_table()

    def grow(self) -> None:
        """Make room for the capacity of the sequences after the first prompt. A budget that is a share then gives more rows."""
        if self.plan is None or self.room >= self.sequences.capacity:
            return
        self.streams.device.allocate(self.slab.data.device, partial(self._grow, self.plan))

    def _grow(self, plan: Plan) -> None:
        longer = self.settings.longer(plan, self.sequences.longest)
        if longer.rows > plan.rows:
            self.slab.widen(self.settings.method.slots(longer.rows))
            if self.own is not None:
                self.drop_search()
                self.own.widen(longer.rows)
        self.plan = longer
        self._make_room()

    def _make_room(self) -> None:
        """Allocate for the capacity of the sequences. Until it grows, no tensor that a step reads moves."""
        capacity = self.sequences.capacity
        if self.own is not None:
            self.own.make_room(capacity)
        self.storage.make_room(capacity, self.fixed_bytes)
        self.room = capacity

    def balance(self, needed: int) -> None:
        """Move a block between device and host if that makes room for `needed` more blocks, or uses spare room."""
        if self.storage.placement is not None:
            self.storage.placement.balance(needed, None if self.own is None else self.own.recalled)
            self.storage.update_table()

    def wait(self) -> None:
        """Wait until every token is offloaded and indexed. Raises the error of any job that failed."""
        self.store.wait()
        if self.own is not None:
            self.own.wait()

    # Changes from outside

    def rollback(self, failed: Step | None, *, ahead: bool = False) -> None:
        self.drop_search()
        if failed is not None:
            if self._again[0] is failed:
                self.asked_again = self._again[1]
            if self.updater is not None:
                self.updater.drop()
            if self.recent_queries.rollback(failed):
                for row in failed.rows():
                    self.slab.tickets[row.seq].zero_()
        for seq in range(self.store.seqs):
            own = failed if failed is not None and failed.has(seq) else None
            length = self.sequences.length(seq) if seq < self.sequences.count else 0
            if length == 0:
                if own is not None:
                    self.clear(seq)
                continue
            start = self.sequences.indexed(seq, length + (ahead and (own is None or not own.parts)))
            indexed = self.updater is not None and self.updater.indexed(seq) > start
            if own is not None or indexed or self.storage.ahead(seq, start):
                self.store.wait()
                if self.updater is not None:
                    self.updater.rollback(seq, start)
                self.storage.rollback(seq, start, length, failed=own is not None)

    def crop(self, seq: int, start: int, length: int, *, exactly: bool = False) -> None:
        """Crop the sequence; see LayerKV. The ring is refilled from the store."""
        self.slab.tickets.zero_()
        self.wait()
        old, before = self.sequences.indexed(seq), self.sequences.length(seq)
        if not self.slab.data.is_cuda:  # there, slots that attention hides must be finite
            for begin, end in (length, min(before, self.slab.regions.sink)), (max(length, old), before):
                self.slab.write(seq, begin, torch.zeros_like(self.slab.read(seq, begin, end)))
        if start < old and self.updater is not None:
            (self.updater.rollback if exactly else self.updater.truncate)(seq, start)
        self.storage.refill(seq, start, min(old, length, before))
        self.storage.truncate(seq, length)

    def clear(self, seq: int) -> None:
        if self.plan is None:
            return
        held = self.store.table.blocks[seq]
        self.recent_queries.pop(seq, None)
        if not self.slab.data.is_cuda:  # there, slots that attention hides must be finite
            self.slab.data[seq].view(torch.uint8).numpy().fill(0)
        if not held and self.retriever is None:
            return  # often an empty slot
        self.drop_search()
        if not all(block.on_device for block in held):
            self.store.wait()  # a block on the device is reused after the work that writes to it
        if self.updater is not None:
            self.updater.clear(seq)
        self.storage.truncate(seq, 0)

    def state(self, seq: int) -> LayerState:
        return replace(self.storage.state(seq), queries=self.recent_queries.get(seq))

    def export(self, seq: int, memory: HostMemory) -> LayerState:
        self.wait()
        state = replace(super().export(seq, memory), index=None if self.updater is None else self.updater.export(seq))
        if self.storage.placement is not None:
            there = self.store.blocks(seq)[: len(state.blocks)]
            self.storage.placement.moved_bytes += sum(block.data.nbytes for block in there if block.on_device)
        return state

    def load(self, seq: int, state: LayerState, start: int) -> None:
        self.storage.load(seq, state, start)
        if self.updater is not None:
            if state.held is not None and state.index is not None:
                start = state.index.end  # it may have run ahead
            self.updater.load(seq, start, state.index)
        if state.queries is not None:
            self.recent_queries[seq] = state.queries.to(self.slab.data.device)

    def copy_slots(self, moves: Moves) -> None:
        self.storage.copy_slots(moves)

    def move(self, moves: Moves) -> None:
        self.storage.move(moves)
        self.recent_queries.move(moves)

    def copy_from(self, other: Self) -> None:
        if other.plan is not None:
            shape = LayerShape.of(other, 0, None)
            self._allocate(other.plan, other.store.seqs, shape.queries, shape.keys, shape.scale)
            self.clone_from(other, pool=True)
            self.asked_again, self.unchecked = other.asked_again, other.unchecked

    def clone_from(self, other: OffloadedLayer, *, pool: bool = False) -> None:
        """Copy the tokens and the index of a layer with the same method and regions. Blocks are shared.

        pool: copy the pool and the counts, too. The plans must be equal.
        """
        other.wait()
        for seq in range(other.store.seqs):
            self.take(seq, other, seq)
        if pool:
            self.storage.copy_pool(other.storage)
        if self.updater is not None and other.updater is not None:
            self.updater.clone_from(other.updater, pool=pool)

    def reorder(self, sequences: Sequence[int]) -> None:
        if self.plan is None:
            return
        self.drop_search()
        self.wait()
        if self.updater is not None:
            self.updater.reorder(sequences)
        self.storage.reorder(sequences)
        self.room = 0  # the block tables belong to other sequences now
        self.recent_queries.reorder(sequences)
