"""One attention layer with offloaded KV: how a new token is stored, and what a query attends to. Read this file first.

A decode step, start to finish:

    ring full?            its oldest tokens are offloaded and indexed: they join the retrieval region
    query    -> index     -> rows -> residency: which of them are on the device already?
             -> transfer fetches the others
             -> attention: new K, V enter the ring; the query attends to sink + ring + selected rows
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvthaw.cache.device_memory import allocating
from kvthaw.cache.host import HostStore
from kvthaw.cache.host_memory import HostMemory
from kvthaw.cache.index_api import RECENT_QUERIES, IndexContext, Rotary, Transfer
from kvthaw.cache.index_updater import IndexUpdater
from kvthaw.cache.layer_base import (
    AttentionParams,
    LayerKV,
    LayerShape,
    PrefillKV,
    RecentQueries,
    attend_rows,
)
from kvthaw.cache.layer_storage import LayerStorage, copied, offload_prompts
from kvthaw.cache.plan import Plan, Settings
from kvthaw.cache.pool import Slab
from kvthaw.cache.retriever import Retriever
from kvthaw.cache.sequences import Sequences
from kvthaw.cache.sparse_attention import SparseAttention
from kvthaw.cache.state import LayerState
from kvthaw.cache.step import Row, Step
from kvthaw.cache.streams import Streams
from kvthaw.cache.transfer import BulkCopy, UvaGather, fetch_choice
from kvthaw.errors import HostMemoryError
from kvthaw.kernels.freeze import Span
from kvthaw.kernels.places import Newest
from kvthaw.kernels.row_format import row_format
from kvthaw.regions import Regions

_ENGINES = 4096
"""Tokens of a prompt from which copy engines take rows to the host instead of a kernel. They need a copy for each block, and one
for each head of a block in part, but leave the multiprocessors to attention."""
_EARLY_PROGRAMS = 128
"""Programs that fetch rows during an MLP. On an H200 kernels of the MLP stood still until 2,048 programs had their rows."""
Leaving = tuple[int, int, int]
"""A sequence and the tokens that leave its ring, start .. stop."""


class OffloadedLayer(LayerKV):
    """KV of one layer: sink, ring and fetched rows in a slab on the device, all rows in a store of blocks; see LayerKV.

    Store and index have watermarks, the positions up to which they have tokens. Adding tokens again therefore does nothing.
    Before the first prompt, slab and store have no sequences.

    leader: the anchor whose index and selections this layer follows; None: it has its own.
    plan: the sizes; None before the first prompt.
    updater: feeds the index; None for a layer without an index of its own.
    room: tokens per sequence that there is device memory for.
    """

    everything = False  # attends to all rows where they lie, without an index; see FullLayer

    def __init__(
        self, number: int, settings: Settings, streams: Streams, sequences: Sequences, leader: OffloadedLayer | None = None
    ) -> None:
        self.number, self.settings, self.streams, self.sequences, self.leader = number, settings, streams, sequences, leader
        self.retriever: Retriever | None = None
        self.rotary: Rotary | None = None  # for a method that asks for it
        self.reset()

    def reset(self) -> None:
        self.drop_search()
        none = Slab(0, 0, 0, Regions(0, 1, 1), 0, dtype=torch.float32, device=torch.device("cpu"))
        self.storage = LayerStorage(HostStore(0, 0, 0, torch.float32), none, self.streams)
        self.sparse = SparseAttention(self.storage, self.sequences, None, None, selects=False)
        self.retriever, self.scale, self.asked_again = None, 0.0, 0  # asked_again: decode steps with another layer's queries
        self.plan: Plan | None = None
        self.room = 0
        self.updater: IndexUpdater | None = None
        self.recent_queries = RecentQueries(self.settings.method.prompt_queries)
        self._taken: tuple[Step | None, int] = None, 0  # a decode step, and how many of its tokens came
        self._again: tuple[Step | None, int] = None, 0  # the last step whose queries came again, and asked_again before it
        self._prompts: dict[int, int] = {}  # where the rings begin of sequences whose prompts ended with the latest prefill
        self.extremes: list[Tensor] = []  # of keys and values of prompts, not known to be finite

    # Reading

    @property
    def store(self) -> HostStore:
        """All rows."""
        return self.storage.store

    @property
    def slab(self) -> Slab:
        """Sink, ring and fetched rows."""
        return self.storage.slab

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
        """Return the bytes on the device apart from blocks: the slab and, in a layer that selects, the index without rotary
        tables."""
        data = self.slab.data
        counted = [data]
        if self.own is not None:
            rotary = self.own.context.rotary
            shared = [] if rotary is None else [id(rotary.cos), id(rotary.sin)]
            tensors = [*self.tensors(), *self.own.residency.tensors()]
            counted = [tensor for tensor in tensors if id(tensor) not in shared]
        return sum({id(tensor): tensor.nbytes for tensor in counted if tensor.device == data.device}.values())

    def host_bytes_per_token(self) -> int:
        """Return the bytes that a stored token takes in this layer; 0 before the first prompt."""
        return self.store.kv_heads * self.store.row_bytes

    def host_bytes(self, seq: int | None = None) -> int:
        return self.store.nbytes(seq) if self.plan else 0

    @property
    def chooses(self) -> bool:
        """Whether this layer has an index of its own, if the method has one."""
        return self.leader is None

    @property
    def own(self) -> Retriever | None:
        """The retriever, if this layer's index is in it."""
        return self.retriever if self.chooses else None

    def tensors(self) -> list[Tensor]:
        if self.plan is None:
            return []
        found, table = [self.slab.data, self.slab.tickets], self.store.table
        if self.retriever is not None:
            found += self.retriever.tensors()
        if self.reads_table and table.addresses.numel():
            found += [table.addresses, table.on_host, self.store.crossed]
        return found

    @property
    def reads_table(self) -> bool:
        """Whether a kernel finds rows through the block table."""
        in_blocks = self.everything or (self.retriever is not None and self.retriever.reads_blocks)
        return in_blocks or isinstance(self.sparse.transfer, UvaGather)

    # Prompts

    def allocate(self, step: Step, query: Tensor, key: Tensor, scale: float) -> None:
        """Create slab, store, index and attention, sized by the first tokens: query [., Hq, T, D], key [., H, T, D]."""
        with self._lasting(key.device):
            self._allocate(step, query, key, scale)
        self.streams.device.fixed[self.number] = self.fixed_bytes()

    def _allocate(self, step: Step, query: Tensor, key: Tensor, scale: float) -> None:
        plan, count = self.settings.plan(step.longest, self.sequences.limit), len(step.left_pad)
        plan = Plan(plan.regions, rows=0) if self.everything else plan
        method, (_, heads, _, dim), self.scale = self.settings.method, key.shape, scale
        how: dict[str, Any] = {
            "block_size": self.settings.block_size,
            "pinned": key.is_cuda,
            "memory": self.streams.memory,
            "format": row_format(self.settings.kv_dtype, dim, key.dtype),
        }
        slab = Slab(count, heads, dim, plan.regions, method.slots(plan.rows), dtype=key.dtype, device=key.device)
        self.storage = LayerStorage(HostStore(count, heads, dim, key.dtype, **how), slab, self.streams)
        transfer: Transfer | None = None
        if method.index is not None and not self.everything:
            transfer = (method.transfer or UvaGather)()
            if transfer.graph_safe and key.is_cpu:
                transfer = BulkCopy()
            if self.leader is None:
                context = IndexContext(
                    self.number, query.shape[1], heads, dim, key.dtype, key.device, self.store, plan.regions, scale,
                    seed=self.settings.seed, rows=plan.rows, slab=slab, sequences=self.sequences, aux=self.streams.aux,
                    deferred=self.streams.deferred, rotary=self.rotary, ranks=self.settings.ranks,
                )  # fmt: skip
                self.retriever = Retriever(method, context, count, plan.rows, self.streams)
                self.updater = IndexUpdater(self.retriever, self.store, slab, self.sequences, self.recent_queries)
            else:
                self.retriever = self.leader.retriever
        if self.everything or (transfer is not None and not self.on_host and (transfer.graph_safe or key.is_cpu)):
            self.storage.place_on_device(self.number)  # what the host reads stays there
        how = {"selects": self.chooses, "everything": self.everything}
        self.sparse = SparseAttention(self.storage, self.sequences, self.retriever, transfer, **how)
        self.plan = plan
        self._make_room(self.sequences.capacity)

    def prefill(
        self, step: Step, query: Tensor, key: Tensor, value: Tensor, attention: AttentionParams
    ) -> tuple[Tensor, PrefillKV]:
        self.drop_search()
        if self.plan is None:
            self.allocate(step, query, key, attention.scale)
        passed, ends = dict[int, Tensor](), self.sequences.announced and not step.remaining
        out = self._attend_dense(step, query, key, value, attention, passed if ends else None)
        return out, self._take(step, query, key, value, passed)

    def _attend_dense(
        self, step: Step, query: Tensor, key: Tensor, value: Tensor, attention: AttentionParams,
        passed: dict[int, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend causally and exactly to all earlier tokens and the new ones.

        passed: receives the rows [H, n, 2, D] of sequences whose index is built with this step, with space for the new
            rows. See _indexes_whole(). Where they take too much memory, kvthaw reads them again after the step.
        """
        if step.start == 0 and (len(step.parts) == 1 or not (step.parts or any(step.left_pad))):
            return attention.causal(query, key, value)
        if step.packs(query.shape[2]):
            return attention.packed(query, key, value, step, self.sequences)

        def attend(row: Row, q: Tensor) -> Tensor:
            k, v = (x[row.row : row.row + 1, :, row.places] for x in (key, value))
            if row.past == 0:
                return attention.causal(q, k, v)
            past = self.storage.past(row.seq, row.past, q.shape[2])
            shape = k.shape[1], row.past + k.shape[2], 2, k.shape[3]
            if (
                passed is not None
                and self._indexes_whole(row.seq)
                and row.seq not in self.sequences.paused
                and self.streams.device.keeps(math.prod(shape) * k.itemsize, k.device)
            ):
                passed[row.seq] = k.new_empty(shape)
                past = copied(past, passed[row.seq])
            return attention.continued(q, k, v, past)

        return attend_rows(step, query, attend)

    def _indexes_whole(self, seq: int) -> bool:
        """Return whether an index on the device is built with the last chunk of a prompt, from all of its rows.

        The rows then pass the device for attention, so they need not cross the bus again.
        """
        return self.updater is not None and not self.on_host and self.updater.is_stale(seq)

    def append(self, step: Step, query: Tensor, key: Tensor, value: Tensor) -> PrefillKV:
        return self._take(step, query, key, value, {})

    def _take(self, step: Step, query: Tensor, key: Tensor, value: Tensor, passed: Mapping[int, Tensor]) -> PrefillKV:
        return PrefillKV(step, key, value, self.recent_queries.take(step, query), passed)

    def store_prompt(self, row: Row, new: PrefillKV) -> None:
        """Store and index the new tokens of one sequence. Sink and ring then hold the rows as the store's format rounds them."""
        (keys, values), own, past = new.of(row), self.storage, row.past
        self.extremes += *torch.aminmax(keys), *torch.aminmax(values)
        keys, values = self.store.format.rounded(keys, values)
        rows = torch.stack((keys, values), dim=2)
        if row.seq in new.passed:
            new.passed[row.seq][:, past:] = rows
        if keys.shape[1] < _ENGINES:
            offload_prompts([own], [replace(row, start=0, stop=keys.shape[1])], rows[None])
        else:
            own.up_to({row.seq: past})
            shared = self.store.length(row.seq) - past
            self.streams.offload(self.store, row.seq, keys[:, shared:], values[:, shared:])
        self.index_prompt(row, new, keys, values)
        for begin, end in self.slab.regions.held_of(past, row.length):
            self.slab.write(row.seq, begin, rows[:, begin - past : end - past])

    def index_prompt(self, row: Row, new: PrefillKV, keys: Tensor, values: Tensor) -> None:
        """Index the new tokens of one sequence, [H, n, D], which are stored."""
        if self.updater is not None:
            self.updater.prompt(row, keys, values, new.queries[row.seq], new.step.remaining)

    def stored(self, new: PrefillKV) -> None:
        """Record that a prefill was stored, and start index builds."""
        ends = self.sequences.announced and not new.step.remaining
        first = self.slab.regions.first_indexed
        self._prompts = {row.seq: first(row.length) for row in new.step.rows()} if ends else {}
        if self.updater is not None:
            self.updater.begin(self._prompts, new.passed)

    def prepare(self, step: Step, shape: LayerShape) -> None:
        if self.plan is None:
            self.allocate(step, shape.queries, shape.keys, shape.scale)
        self.recent_queries.begin(step)
        self._prompts = {}

    def begin(self, step: Step, shape: LayerShape, states: Mapping[int, LayerState]) -> None:
        super().begin(step, shape, states)
        placement, store = self.storage.placement, self.store
        if placement is not None and not step.parts:  # else other sequences wait for steps, and blocks go one by one
            for row in step.rows():
                placement.bring(store.blocks(row.seq)[: store.length(row.seq) // store.block_size])

    def commit(self) -> None:
        """Index the tokens of a prefill that waited for the step's commit."""
        if self.updater is not None:
            self.updater.commit()
            self.updater.renew(self._prompts)

    # Decoding

    def decode(self, step: Step, t: int, query: Tensor, newest: Newest, attention: AttentionParams) -> Tensor:
        if t == 0 and self.own is not None:
            self.own.choices.clear()
        self._taken = step, t + 1
        out = self._attend(step, t, query, newest, attention)
        if t == step.tokens - 1 and self.retriever is not None and self.retriever.prefetched is not None:
            self.drop_search()
        return out

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

    # Queries that are known before the layer runs

    def asks(self, tokens: int) -> bool:
        """Return whether this layer's own index selects rows for a step of `tokens` tokens."""
        return self.own is not None and self.sequences.decodes(tokens)

    def prefetch(self, queries: Tensor) -> None:
        """Search with predicted queries, [B, Hq, T, D], instead of the next tokens' own.

        An index on the host starts at once, concurrently with the layer before, for the tokens before the index changes.
        """
        if self.own is not None:
            self.own.prefetch(queries, self.undisturbed(queries.shape[2]) if self.on_host else 0)

    def choose_early(self, step: Step, predict: Callable[[], Tensor], *reads: Tensor) -> None:
        """Choose the rows of a step's tokens by a predicted query, [B, Hq, T, D]. A single token's are fetched at once, during the
        MLP of the layer before. An index on the host begins to search.

        predict: returns the query. It may run on a side stream.
        reads: tensors that `predict` reads.
        """
        own, transfer = self.own, self.sparse.transfer
        if step.tokens > 1 or self.on_host:
            self.prefetch(predict())
        elif own is not None and transfer is not None:
            transfer = UvaGather(_EARLY_PROGRAMS) if isinstance(transfer, UvaGather) else transfer
            fetch = partial(fetch_choice, transfer, store=self.store, slab=self.slab, index=own.index)
            own.choose_early(predict, step.start + 1 - min(step.left_pad), fetch, reads)

    def undisturbed(self, tokens: int) -> int:
        """Return how many of the next tokens come before tokens leave a ring and so change the index."""
        updater, leaving = self.updater, map(self.sequences.leaving, range(tokens))
        if updater is not None and updater.stale:
            return 0
        changes = (any(updater is None or updater.indexed(seq) < stop for seq, _, stop in before) for before in leaving)
        return next((t for t, changed in enumerate(changes) if changed), tokens)

    def drop_search(self) -> None:
        """Drop the predicted queries and their searches."""
        if self.own is not None:
            self.own.drop_search()

    # Between steps

    @property
    def on_host(self) -> bool:
        """Whether the layer's index works on the host, concurrently with the device."""
        return self.retriever is not None and self.retriever.index.traits.on_host

    @property
    def can_run_ahead(self) -> bool:
        """Whether rollback() undoes run_ahead() exactly. An index on the host can drop the tokens again; its tree's shape may
        differ."""
        if self.on_host:
            return not self.asked_again
        return self.updater is None or self.updater.retriever.index.reversible

    def before_step(self) -> None:
        """Prepare for the next step; see LayerKV. A step of one token then runs on the device alone if the index is
        graph-safe."""
        self._trim_queries()
        self.storage.order()
        self.grow()
        if self.retriever is not None and not self.on_host:
            self.retriever.wait()
        self.update_table()

    def _trim_queries(self) -> None:
        """Free the early queries of indexed prompts, if the method kept all of them until then."""
        if self.updater is None or self.recent_queries.most is not None:
            return
        for seq, known in self.recent_queries.items():
            indexed = self.updater.indexed(seq) > self.updater.first and seq not in self.sequences.idle
            if indexed and known.shape[1] > RECENT_QUERIES:
                self.recent_queries[seq] = known[:, -RECENT_QUERIES:].clone()

    def grow(self) -> None:
        """Make room for the capacity of the sequences, in a layer that has had a prompt. A budget that is a share of the length
        then gives more rows."""
        if self.plan is None or self.room >= self.sequences.capacity:
            return
        with self._lasting(self.slab.data.device):
            longer = self.settings.longer(self.plan, self.sequences.longest)
            if longer.rows > self.plan.rows:
                self.slab.widen(self.settings.method.slots(longer.rows))
                if self.own is not None:
                    self.own.widen(longer.rows)
            self.plan = longer
            self._make_room(self.sequences.capacity)

    def _make_room(self, capacity: int) -> None:
        """Allocate for `capacity` tokens per sequence. Until capacity grows, no tensor that a step reads moves."""
        if self.own is not None:
            self.own.make_room(capacity)
        if self.reads_table:
            self.store.table.make_room(capacity, self.slab.data.device)
        self.room = capacity
        if self.storage.placement is not None:
            self.storage.placement.make_room(capacity, self.fixed_bytes())

    def update_table(self) -> None:
        """Copy the addresses of new blocks to the device, which then waits for their rows."""
        if self.reads_table:
            self.storage.order()
        self.follow_blocks()

    def follow_blocks(self) -> None:
        """Copy the addresses of new blocks to the device. Their rows may still be in transfer."""
        if self.reads_table:
            self.store.table.on(self.slab.data.device)
            if self.storage.placement is not None:
                self.storage.placement.device.memory.spills |= self.store.table.some_on_host

    def _lasting(self, device: torch.device) -> AbstractContextManager[None]:
        return allocating(self.streams.device.pool(device), device)

    def reserved(self, seq: int) -> int:
        """Return how many tokens of a sequence its blocks can hold."""
        return self.store.reserved(seq) if seq < self.store.seqs else 0

    def lacking(self, leaving: Sequence[Leaving]) -> list[Span]:
        """Return the spans of leaving tokens that the index or the store lacks. Stale sequences are left out."""
        spans: list[Span] = []
        for seq, start, stop in leaving:
            given = self.updater is None or self.updater.indexed(seq) >= stop
            stored = self.storage.stored(seq, stop)
            if not (given and stored == stop) and not self.stale(seq):
                spans.append((seq, stop if given else start, stop, stored))
        return spans

    def stale(self, seq: int) -> bool:
        """Return whether a sequence must be indexed again."""
        return self.updater is not None and self.updater.is_stale(seq)

    def rounds(self) -> int:
        """Return the steps within which the next block of every sequence and layer is allocated ahead, each once."""
        size = self.store.block_size
        return min(self.streams.layers * self.store.seqs, max(1, size // 2, size - self.slab.regions.buffer))

    def preallocate(self, seq: int, length: int) -> bool:
        """Allocate the next block of a sequence, or make room for it on the device, if it needs the block before its next
        turn. Returns whether it lies on the host.

        Does nothing on a full device while other sequences hold blocks there ahead: the sequence takes one of these.

        length: the sequence's tokens.
        """
        store, allocator, placement = self.store, self.store.allocator, self.storage.placement
        most = self.sequences.end(seq)
        needs = store.reserved(seq) < most and seq not in allocator.ahead and not allocator.takes_from_others()
        steps = store.reserved(seq) + self.slab.regions.window + 1 - length  # a lower bound of the steps until it is needed
        due = needs and steps < self.rounds()
        if placement is not None:
            placement.balance(int(due), None if self.updater is None else self.updater.retriever.recalled)
        if due and (placement is None or not placement.spilling):
            try:
                return not allocator.preallocate(seq).on_device
            except HostMemoryError as error:  # raised again when the sequence needs the block
                allocator.memory.warn(error)
        return False

    def wait(self) -> None:
        """Wait until every token is offloaded and indexed. Raises the error of any job that failed."""
        self.store.wait()
        if self.updater is not None:
            self.updater.retriever.wait()

    # Changes from outside

    def rollback(self, failed: Step | None, *, ahead: bool = False) -> None:
        if failed is not None and self.own is not None:
            self.own.recover()
        self.drop_search()
        if failed is not None:
            if self._again[0] is failed:
                self.asked_again = self._again[1]
            if self.own is not None and self.updater is not None:
                self.updater.drop()
                self.own.forget_step()
            if self.recent_queries.rollback(failed):
                self.extremes = []
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
        old = self.sequences.indexed(seq)
        if start < old and self.updater is not None:
            (self.updater.rollback if exactly else self.updater.truncate)(seq, start)
        self.storage.refill(seq, start, min(old, length, self.sequences.length(seq)))
        self.storage.truncate(seq, length)

    def clear(self, seq: int) -> None:
        if self.plan is None:
            return
        self.drop_search()
        self.extremes = []
        if self.store.length(seq):
            self.store.wait()
        if self.updater is not None:
            self.updater.clear(seq)
        self.storage.truncate(seq, 0)
        self._prompts.pop(seq, None)
        self.recent_queries.pop(seq, None)

    def export(self, seq: int, memory: HostMemory) -> LayerState:
        self.wait()
        queries, index = self.recent_queries.get(seq), None if self.updater is None else self.updater.export(seq)
        blocks, held = self.storage.export(seq)
        queries = None if queries is None else queries.cpu()
        return LayerState(blocks, self.store.length(seq), held=held, queries=queries, index=index)

    def load(self, seq: int, state: LayerState, start: int) -> None:
        self.storage.load(seq, state, start)
        if self.updater is not None:
            if state.held is not None and state.index is not None:
                start = state.index.end  # it may have run ahead
            self.updater.load(seq, start, state.index)
        if state.queries is not None:
            self.recent_queries[seq] = state.queries.to(self.slab.data.device)

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


class FullLayer(OffloadedLayer):
    """Sink and ring in a slab, and all other rows in blocks, where attention reads them; see LayerKV.

    A DenseLayer reserves every sequence's capacity. A FullLayer allocates blocks as tokens come, so a running batch of
    short sequences with a large capacity may attend to everything. If the device is full, a block lies on the host and
    attention reads it over the bus.
    """

    everything = True

    def _attend(self, step: Step | None, t: int, query: Tensor, newest: Newest, attention: AttentionParams) -> Tensor:
        return self.sparse.attend(step, t, query, newest, attention)[0]
