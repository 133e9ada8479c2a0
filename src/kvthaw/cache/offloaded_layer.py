"""One attention layer whose KV is offloaded: what happens to a new token, and what a query attends to. The file to read first.

A decode step, start to finish:

    ring full?            its oldest tokens leave for the retrieval region: they are offloaded and indexed
    query    -> index     -> rows -> residency: which of them are on the device already?
             -> transfer brings the others
             -> attention: new K, V enter the ring; the query attends to sink + ring + selected rows
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvthaw.cache.dense import DenseLayer
from kvthaw.cache.host import HostStore
from kvthaw.cache.index_api import IndexContext, Transfer
from kvthaw.cache.index_updater import IndexUpdater
from kvthaw.cache.layer_base import WATCHED, AttentionParams, LayerKV, last_queries, padded, reordered
from kvthaw.cache.offloader import Offloader
from kvthaw.cache.plan import Plan, Settings
from kvthaw.cache.pool import Slab
from kvthaw.cache.preallocator import BlockPreallocator
from kvthaw.cache.prefetched_search import PrefetchedSearch
from kvthaw.cache.retriever import Choice, Retriever
from kvthaw.cache.rotary import Rotary
from kvthaw.cache.sequences import Row, Sequences, Step
from kvthaw.cache.streams import Streams
from kvthaw.cache.transfer import BulkCopy, UvaGather
from kvthaw.errors import CacheError, ConfigError
from kvthaw.kernels.decode_step import DecodeStep
from kvthaw.kernels.dense import causal_attention, continued
from kvthaw.kernels.places import Newest
from kvthaw.kernels.sparse_decode import sparse_decode


class OffloadedLayer:
    """KV of one layer: sink, ring and fetched rows in a slab on the device, everything in a store on the host; see LayerKV.

    leader: the anchor whose index and selections this layer follows; None: it has its own. plan: the sizes, None before the first
    prompt.
    """

    store: HostStore
    slab: Slab
    offloader: Offloader

    def __init__(
        self,
        number: int,
        settings: Settings,
        streams: Streams,
        sequences: Sequences,
        preallocator: BlockPreallocator,
        leader: OffloadedLayer | None = None,
    ) -> None:
        self.number, self.settings, self.streams, self.sequences, self.leader = number, settings, streams, sequences, leader
        self.preallocator = preallocator
        self.rotary: Rotary | None = None  # for a method that asks for it
        self.observer: Callable[[OffloadedLayer, Tensor, Choice | None], None] | None = None
        self.reset()

    def reset(self) -> None:
        """See LayerKV."""
        self.drop_search()
        self.plan: Plan | None = None
        self.retriever: Retriever | None = None
        self.updater: IndexUpdater | None = None  # of an anchor
        self.watched: dict[int, Tensor] = {}
        self.scale = 0.0
        self._transfer: Transfer | None = None
        self._before: tuple[Step | None, dict[int, Tensor]] = None, {}  # a prefill, and what was watched before it
        self._taken: tuple[Step | None, int] = None, 0
        self._room = 0
        self._finite: Tensor | None = None
        self.asked_again = 0  # decode steps with the queries of another layer that shares these keys

    # Reading

    def length(self, seq: int) -> int:
        """See LayerKV."""
        step, taken = self._taken
        under_way = step is not None and step is self.sequences.step and step.seq is None
        return step.lengths(taken)[seq] if step is not None and under_way else self.sequences.length(seq)

    def indexed(self, seq: int) -> int:
        """Where the sequence's ring begins: positions [sink, this) are in the retrieval region."""
        return self.sequences.indexed(seq, self.length(seq))

    def read(self, seq: int, start: int, stop: int) -> Tensor:
        """See LayerKV."""
        return self.offloader.read(seq, start, stop)

    def nonfinite(self) -> Tensor | None:
        """See LayerKV."""
        return self.slab.tickets[-1:] if self.plan else None

    def device_bytes(self) -> int:
        """Bytes of KV on the device: sink, ring and pool."""
        return self.slab.data.nbytes if self.plan else 0

    def host_bytes(self, seq: int | None = None) -> int:
        """See LayerKV."""
        return self.store.nbytes(seq) if self.plan else 0

    @property
    def chooses(self) -> bool:
        """Whether this layer has an index of its own, where the method has one."""
        return self.leader is None

    def tensors(self) -> list[Tensor]:
        """See LayerKV."""
        if self.plan is None:
            return []
        found = [self.slab.data, self.slab.tickets]
        if self.retriever is not None:
            found += self.retriever.tensors()
        if isinstance(self._transfer, UvaGather) and self._transfer.table is not None:
            found.append(self._transfer.table)
        return found

    # Prompts

    def allocate(self, step: Step, query: Tensor, key: Tensor, scale: float) -> None:
        """Make the parts by the sizes of the first tokens: query [., Hq, T, D], key [., H, T, D]."""
        plan, count = self.settings.plan(step.longest, self.sequences.limit), len(step.left_pad)
        _, heads, _, dim = key.shape
        method, device = self.settings.method, key.device
        self.scale = scale
        self.store = HostStore(
            count,
            heads,
            dim,
            key.dtype,
            block_size=self.settings.block_size,
            pinned=device.type == "cuda",
            memory=self.streams.memory,
        )
        self.slab = Slab(count, heads, dim, plan.regions, plan.rows * max(1, method.keep), dtype=key.dtype, device=device)
        self.offloader = Offloader(self.store, self.slab, self.streams, keeps=not method.evicts)
        if method.index is not None:
            self._transfer = (method.transfer or UvaGather)() if key.is_cuda else BulkCopy()
            if self.leader is None:
                context = IndexContext(
                    layer=self.number,
                    q_heads=query.shape[1],
                    kv_heads=heads,
                    head_dim=dim,
                    dtype=key.dtype,
                    device=device,
                    store=self.store,
                    regions=plan.regions,
                    scale=scale,
                    seed=self.settings.seed,
                    rows=plan.rows,
                    slab=self.slab,
                    sequences=self.sequences,
                    aux=self.streams.aux,
                    deferred=self.streams.deferred,
                    rotary=self.rotary,
                )
                self.retriever = Retriever(method, context, count, plan.rows, self.streams)
                self.updater = IndexUpdater(self.retriever, self.store, self.slab, self.streams.deferred)
            else:
                self.retriever = self.leader.retriever
        self.plan = plan
        self._make_room()

    def prefill(self, step: Step, query: Tensor, key: Tensor, value: Tensor, attention: AttentionParams) -> Tensor:
        """See LayerKV."""
        self.drop_search()
        self._allocate_for(step, query, key, attention.scale)
        out = self._attend_dense(step, query, key, value, attention)
        self.append(step, query, key, value)
        return out

    def _allocate_for(self, step: Step, query: Tensor, key: Tensor, scale: float) -> None:
        if self.plan is None:
            self.allocate(step, query, key, scale)

    def _attend_dense(self, step: Step, query: Tensor, key: Tensor, value: Tensor, attention: AttentionParams) -> Tensor:
        """Causal attention over all earlier tokens and the new ones, exact."""
        if step.start == 0 and (step.seq is not None or not any(step.left_pad)):
            return _causal(query, key, value, attention)
        out = torch.zeros_like(query)
        for row in step.rows():
            one = slice(row.row, row.row + 1)
            q, k, v = (x[one, :, row.pad :] for x in (query, key, value))
            if row.past == 0:
                found = _causal(q, k, v, attention)
            else:
                past = self.offloader.past(row.seq, row.past, self.sequences.indexed(row.seq))
                found = continued(q, k, v, past, scale=attention.scale, softcap=attention.softcap, sinks=attention.sinks)
            out[one, :, row.pad :] = found
        return out

    def append(self, step: Step, query: Tensor, key: Tensor, value: Tensor) -> None:
        """See LayerKV."""
        assert self.plan is not None
        self._before = step, dict(self.watched)
        finite = torch.isfinite(key).all() & torch.isfinite(value).all()
        self._finite = finite if self._finite is None else self._finite & finite
        ends = {}
        for row in step.rows():
            q = query[row.row, :, row.pad - step.tokens :]  # a clone has the last queries only
            k, v = (x[row.row, :, row.pad :] for x in (key, value))
            ends[row.seq] = self._append_row(row, q, k, v, step.remaining)
        self._taken = step, step.tokens
        if self.updater is not None and self.sequences.announced and not step.remaining:
            self.updater.renew(ends, self.watched)

    def _append_row(self, row: Row, query: Tensor, keys: Tensor, values: Tensor, remaining: int) -> int:
        """Take the tokens [., n, D] of one sequence in. Returns where its ring begins then."""
        assert self.plan is not None
        regions, past, seq = self.plan.regions, row.past, row.seq
        self.watched[seq] = last_queries(self.watched.get(seq), query)
        length = past + keys.shape[1]
        start = regions.first_indexed(length)
        self.offloader.prompt(seq, past, keys, values)
        if self.offloader.keeps:
            self.preallocator.take(self.store, regions, seq, length)
        if self.updater is not None and start > self.updater.indexed[seq]:
            self.updater.prompt(seq, start, keys, values, past, query[:, -WATCHED:], remaining)
        sink = max(0, min(regions.sink, length) - past)
        if sink:
            self.slab.write(seq, past, torch.stack((keys[:, :sink], values[:, :sink]), dim=2))
        ring = max(start, past)
        if ring < length:
            self.slab.write(seq, ring, torch.stack((keys[:, ring - past :], values[:, ring - past :]), dim=2))
        return start

    # Decoding

    def decode(self, step: Step, query: Tensor, key: Tensor, value: Tensor, attention: AttentionParams) -> Tensor:
        """See LayerKV."""
        if self.retriever is not None and self.chooses:
            self.retriever.choices.clear()
        outs = []
        for t in range(step.tokens):
            if t and self.sequences.full(t):
                self.before_step(self.sequences.leaving(t), taken=t)
            self._taken = step, t + 1
            self.sequences.place(step, t, self.slab.data.device)
            outs.append(self._attend(step, t, query[:, :, t], (key[:, :, t], value[:, :, t]), attention))
        self.prefetched = None
        return torch.stack(outs, dim=2) if step.tokens > 1 else outs[0][:, :, None]

    def attend_again(self, start: int, query: Tensor, key: Tensor, value: Tensor, attention: AttentionParams) -> Tensor:
        """See LayerKV."""
        self.asked_again += query.shape[2] == 1
        steps = query.shape[2]
        again = Step(start, steps, tuple(self.sequences.left_pad), self.sequences.idle)
        if steps > 1:
            return self._attend_dense(again, query, key, value, attention)
        self.sequences.place_committed(self.slab.data.device)
        out = self._attend(None, 0, query[:, :, 0], (key[:, :, 0], value[:, :, 0]), attention)
        if self.retriever is not None and self.chooses:
            self.retriever.meter.tick(self.sequences.live_count)
        return out[:, :, None]

    def _attend(self, step: Step | None, t: int, query: Tensor, newest: Newest, attention: AttentionParams) -> Tensor:
        """One decode step: select, fetch, attend. query [B, Hq, D]; newest: key and value [B, H, D] of its token, which enter the
        ring (again, where another layer's queries come); step: None for those."""
        assert self.plan is not None
        choice, visible, log_weight, partials = None, None, None, []
        if self.retriever is not None and self._transfer is not None:
            choice = self._choose(step, query, t) if self.chooses else self.retriever.choices[t].followed
            self._wait_on_stream()
            slots, fetch = choice.host if choice.host and not self._transfer.graph_safe else (choice.slots, choice.fetch)
            self._transfer.fetch(self.store, self.slab, fetch, slots)
            if self.chooses and self.retriever.rebuilds is not None:
                self.retriever.rebuilds.rebuild(self.slab, choice.fetch, choice.slots)
            visible, selection = choice.live, choice.selection
            if selection.partial is not None:
                if attention.softcap is not None:
                    raise ConfigError(
                        f"{self.settings.method.name} attends to some tokens itself, without the softcap of {attention.softcap} "
                        "that the model has; it works with models that have none"
                    )
                partials.append(selection.partial)
            if selection.log_weight is not None:
                log_weight = self._by_place(selection.log_weight, choice)
        decode_step = DecodeStep(
            query,
            self.slab.keys,
            self.slab.values,
            scale=attention.scale,
            newest=newest,
            visible=visible,
            lengths=self.sequences.lengths,
            starts=self.sequences.starts,
            regions=self.plan.regions,
            softcap=attention.softcap,
            sinks=attention.sinks,
            log_weight=log_weight,
            partials=partials,
        )
        out = sparse_decode(decode_step, self.slab.tickets)
        if self.observer is not None:
            self.observer(self, query, choice)
        return out

    def _choose(self, step: Step | None, query: Tensor, t: int) -> Choice:
        assert self.retriever is not None
        longest = self.sequences.longest if step is None else step.start + t + 1 - min(step.left_pad)
        retaken = step is not None and step.retaken
        if self.prefetched is None:
            return self.retriever.choose(query, longest, retaken=retaken)
        return self.retriever.choose(self.prefetched.queries[:, :, t], longest, self.prefetched.search(t), retaken=retaken)

    def _by_place(self, log_weight: Tensor, choice: Choice) -> Tensor:
        """log_weight [B, Hq, M] moved to the places of the slab, [B, Hq, N]; 0 elsewhere."""
        batch, q_heads, _ = log_weight.shape
        heads, places = self.slab.data.shape[1:3]
        slot = torch.where(choice.slots >= 0, choice.slots + self.slab.pool_start, places).to(log_weight.device).long()
        slot = slot.repeat_interleave(q_heads // heads, dim=1)
        spread = torch.zeros((batch, q_heads, places + 1), dtype=torch.float32, device=log_weight.device)
        return spread.scatter_(2, slot, log_weight)[:, :, :places]

    # Queries that are known before the layer runs

    def asks(self, tokens: int) -> bool:
        """Whether an index of this layer's own is asked when so many tokens come."""
        return self.retriever is not None and self.chooses and self.sequences.decodes(tokens)

    def prefetch(self, queries: Tensor) -> None:
        """Have the index asked with these queries, [B, Hq, T, D], instead of the coming tokens' own. One on the host begins to
        search at once, beside the layer before, for as many of the tokens as come before it changes."""
        assert self.retriever is not None
        self.drop_search()
        early = self.undisturbed(queries.shape[2]) if self.retriever.index.on_host else 0
        self.prefetched = PrefetchedSearch(queries, self.retriever.search(queries[:, :, :early]) if early else ())

    def undisturbed(self, tokens: int) -> int:
        """How many of the next tokens ask an index of what it was given so far: before the others, something leaves the ring."""
        assert self.updater is not None
        if self.updater.stale:
            return 0
        left = (any(self.updater.indexed[seq] < stop for seq, _, stop in self.sequences.leaving(t)) for t in range(tokens))
        return next((t for t, leaves in enumerate(left) if leaves), tokens)

    prefetched: PrefetchedSearch | None = None
    """Queries to ask the index with instead of the coming tokens' own."""

    def drop_search(self) -> None:
        """Drop the predicted queries and their searches: the step does not come."""
        if self.prefetched is not None:
            self.prefetched.drop()
            self.prefetched = None

    # Between steps

    @property
    def on_host(self) -> bool:
        """Whether the layer's index works on the host, beside the device."""
        return self.retriever is not None and self.retriever.index.on_host

    @property
    def can_run_ahead(self) -> bool:
        """See LayerKV. A tree on the host forgets what it was given, but for its shape."""
        if self.on_host:
            return not self.asked_again
        return self.updater is None or self.updater.reversible

    def before_step(self, leaving: Sequence[tuple[int, int, int]], taken: int = 0) -> None:
        """See LayerKV. Afterwards a step of one token is work of the device alone, where the index is graph-safe. taken: tokens of
        the step under way that are in the ring already."""
        if self.plan is None:
            return
        self.check_finite()
        self.streams.prefetcher.release()
        if self.updater is not None and not taken:
            live = (seq for seq in range(self.sequences.count) if seq not in self.sequences.idle)
            self.updater.renew({seq: self.sequences.indexed(seq) for seq in live}, self.watched)
        self._flush(leaving)
        self._wait_on_stream()
        self._make_room()
        if self.retriever is not None and not self.on_host:
            self.retriever.settle()
        self._know_addresses()

    def run_ahead(self, leaving: Sequence[tuple[int, int, int]]) -> bool:
        """See LayerKV. The device is still at work: an index on the host takes as long as a layer's whole step, and thirty launches
        a layer as long as a step. What cannot be done now is left to before_step, which raises the reason if there is still one."""
        ready = [each for each in leaving if self.updater is None or each[0] not in self.updater.stale]
        try:
            self._flush(ready)
        except Exception:
            return False
        if isinstance(self._transfer, UvaGather):
            self._wait_on_stream()
            self._know_addresses()
        return len(ready) == len(leaving)

    def _flush(self, leaving: Sequence[tuple[int, int, int]]) -> None:
        """Offload and index tokens that leave their rings, as far as that has not been done."""
        if leaving:
            self.offloader.up_to({seq: stop for seq, _, stop in leaving})
            if self.updater is not None:
                self.updater.flush(leaving, self.watched)

    def reserved(self, seq: int) -> int:
        """Tokens of a sequence that its blocks on the host have room for."""
        return self.store.reserved(seq) if self.plan and seq < self.store.seqs else 0

    def reserve_blocks(self, ends: Mapping[int, int]) -> None:
        """See LayerKV."""
        if self.plan is not None and self.offloader.keeps:
            for seq, end in ends.items():
                if end > self.store.length(seq):
                    self.store.claim(seq, end)

    def preallocate(self, seq: int) -> None:
        """Take the host block that a sequence will need before its next turn."""
        if self.plan is not None and self.offloader.keeps:
            self.preallocator.take(self.store, self.plan.regions, seq, self.sequences.length(seq))

    def _make_room(self) -> None:
        """Have room for the sequences' capacity: until that grows, nothing that a step reads moves."""
        capacity = self.sequences.capacity
        if self._room < capacity:
            if self.retriever is not None and self.chooses:
                self.retriever.make_room(capacity)
            if isinstance(self._transfer, UvaGather):
                self._transfer.make_room(self.store, capacity, self.slab.data.device)
            self._room = capacity

    def _wait_on_stream(self) -> None:
        """The device reads what was offloaded; a transfer that gathers on the host has the host wait."""
        if self._transfer is None or self._transfer.graph_safe:
            self.offloader.wait_on_stream()
        else:
            self.offloader.wait()

    def _know_addresses(self) -> None:
        """A captured step finds the addresses of new blocks."""
        if isinstance(self._transfer, UvaGather):
            self._transfer.prepare(self.store, self.slab.data.device)

    def check_finite(self) -> None:
        """Raise CacheError where a prompt's keys or values were not finite."""
        if self._finite is not None:
            if not self._finite:
                raise CacheError(f"the model gave keys or values that are not finite in layer {self.number}")
            self._finite = None

    def wait(self) -> None:
        """See LayerKV."""
        if self.plan is None:
            return
        self.check_finite()
        self.offloader.wait()
        if self.retriever is not None:
            self.retriever.settle()

    # Changes from outside

    def recover(self) -> None:
        """See LayerKV."""
        if self.retriever is not None and self.chooses:
            self.retriever.recover()

    def rollback(self, failed: Step | None, *, repeated: bool = False) -> None:
        """See LayerKV."""
        if not repeated:
            self.drop_search()
        if self.plan is None:
            return
        if failed is not None and not repeated and self.retriever is not None and self.chooses:
            self.retriever.forget_slots()
        if failed is not None and not repeated and self._before[0] is failed:
            self.watched, self._before, self._finite = self._before[1], (None, {}), None
        for seq in range(self.store.seqs):
            changed = failed is not None and not repeated and failed.seq in (None, seq)
            length = self.sequences.length(seq) if seq < self.sequences.count else 0
            if length == 0:
                if changed:
                    self.clear(seq)
                continue
            start = self.sequences.indexed(seq, length + repeated)
            stored = self.offloader.ahead(seq, start)
            if not changed and not stored and (self.updater is None or self.updater.indexed[seq] <= start):
                continue
            self.offloader.wait()
            if self.updater is not None:
                self.updater.rollback(seq, start)
            if failed is not None and changed:
                if not self.offloader.keeps and (failed.dense or start < length + failed.tokens - self.plan.regions.ring):
                    raise CacheError(
                        f"{self.settings.method.name} has dropped tokens that a failed step leaves behind; reset() the cache"
                    )
                self.offloader.refill(seq, start, length)
            if stored:
                self.offloader.undo(seq)
            if changed:
                self.offloader.truncate(seq, length)

    def check_crop(self, drop: int) -> None:
        """See LayerKV."""
        if self.plan is None or not self.settings.method.evicts:
            return
        sequences, sink = self.sequences, self.plan.regions.sink
        for seq in range(sequences.count):
            if max(0, sequences.length(seq) - drop) < sequences.indexed(seq) > sink:
                raise CacheError(f"{self.settings.method.name} has dropped the tokens that crop({-drop}) would bring back")

    def crop(self, seq: int, start: int, length: int) -> None:
        """See LayerKV. The ring is refilled from the store."""
        if self.plan is None:
            return
        self.slab.tickets.zero_()
        if not self.offloader.keeps:
            return
        old, before = self.sequences.indexed(seq), self.sequences.length(seq)
        self.offloader.wait()
        if self.retriever is not None:
            self.retriever.settle()
        if start < old and self.updater is not None:
            self.updater.truncate(seq, start)
        self.offloader.refill(seq, start, min(old, length, before))
        self.offloader.truncate(seq, length)

    def clear(self, seq: int) -> None:
        """See LayerKV."""
        if self.plan is None:
            return
        self.drop_search()
        self._finite = None
        self.slab.tickets.zero_()
        self.offloader.wait()
        if self.updater is not None:
            self.updater.clear(seq)
        self.offloader.truncate(seq, 0)
        self.watched.pop(seq, None)

    def reorder(self, sequences: Sequence[int]) -> None:
        """See LayerKV."""
        if self.plan is None:
            return
        self.drop_search()
        self.offloader.wait()
        if self.retriever is not None:
            self.retriever.settle()
        if self.updater is not None:
            self.updater.reorder(sequences)
        self.offloader.reorder(sequences)
        self.slab.reorder(torch.tensor(sequences, device=self.slab.data.device))
        self.watched = reordered(self.watched, sequences)
        self._room = 0  # tables of addresses are of as many sequences

    # Tokens of another cache

    def clone_from(self, step: Step, other: LayerKV) -> None:
        """See LayerKV. What a dense layer has offloaded for one fork is shared by the others; an index that serves as it is is not
        built again."""
        if isinstance(other, OffloadedLayer):
            other.wait()
            if other.settings.method.evicts:
                raise CacheError(f"{other.settings.method.name} has dropped tokens, so its cache cannot be forked")
            if self.can_reuse(other):
                self._reuse(step, other)
                return
        queries, key, value = padded(other)
        self.allocate(step, queries, key, other.scale)
        if isinstance(other, DenseLayer) and self.offloader.keeps:
            self.store.share(other.offloaded(self.settings.block_size))
        self.append(step, queries, key, value)

    def can_reuse(self, other: OffloadedLayer) -> bool:
        """Whether another layer's index is what this layer's would be: of the same method object, whose index serves any budget, of
        the same regions, and built of one prompt that nothing has followed."""
        mine, its, plan = self.settings, other.settings, other.plan
        same = (
            mine.method is its.method and mine.method.any_budget and (mine.seed, mine.block_size) == (its.seed, its.block_size)
        )
        sequences = other.sequences
        if not same or not sequences.prompt_only or plan is None:
            return False
        updater = other.updater
        ahead = updater is not None and any(updater.indexed[seq] > sequences.indexed(seq) for seq in range(sequences.count))
        return not ahead and mine.plan(sequences.longest, self.sequences.limit).regions == plan.regions

    def _reuse(self, step: Step, other: OffloadedLayer) -> None:
        """Become what the other layer is, but for the number of rows; the host's rows are shared."""
        queries, held = next(iter(other.watched.values())), other.slab.keys
        self.allocate(step, queries[None], held[:, :, :1], other.scale)
        self.store.share(other.store)
        always = other.slab.pool_start
        self.slab.data[:, :, :always] = other.slab.data[:, :, :always]
        self.watched = dict(other.watched)
        if self.updater is not None and other.updater is not None:
            self.updater.clone_from(other.updater)
            self.updater.retriever.make_room(self.sequences.capacity)

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadedLayer:
        if self.plan is not None:
            self.offloader.wait()
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return twin


def _causal(query: Tensor, keys: Tensor, values: Tensor, attention: AttentionParams) -> Tensor:
    return causal_attention(query, keys, values, scale=attention.scale, softcap=attention.softcap, sinks=attention.sinks)
