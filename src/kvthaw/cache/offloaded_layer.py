"""One attention layer whose KV is offloaded: what happens to a new token, and what a query attends to. The file to read first.

A decode step, start to finish:

    ring full?            its oldest tokens leave for the retrieval region: they are offloaded and indexed
    query    -> index     -> rows -> residency: which of them are on the device already?
             -> transfer brings the others
             -> attention: new K, V enter the ring; the query attends to sink + ring + selected rows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvthaw.cache.finite import PromptCheck
from kvthaw.cache.host import HostStore
from kvthaw.cache.host_memory import Block, HostMemory
from kvthaw.cache.index_api import IndexContext, Transfer
from kvthaw.cache.index_updater import IndexUpdater, Snapshot
from kvthaw.cache.layer_base import AttentionParams, LayerKV, attend_rows, reordered
from kvthaw.cache.layer_storage import LayerStorage, flush
from kvthaw.cache.offloader import copied
from kvthaw.cache.plan import Plan, Settings
from kvthaw.cache.pool import Slab
from kvthaw.cache.preallocator import BlockPreallocator
from kvthaw.cache.prompts import SHORT, Given, append, take_queries
from kvthaw.cache.retriever import Retriever
from kvthaw.cache.rotary import Rotary
from kvthaw.cache.sequences import Sequences
from kvthaw.cache.sparse_attention import SparseAttention
from kvthaw.cache.step import Row, Step
from kvthaw.cache.streams import Streams
from kvthaw.cache.swapped import SwappedLayer
from kvthaw.cache.transfer import BulkCopy, PagedCopy, UvaGather
from kvthaw.errors import CacheError
from kvthaw.kernels.dense import continued
from kvthaw.kernels.places import Newest


class OffloadedLayer(LayerKV):
    """KV of one layer: sink, ring and fetched rows in a slab on the device, everything in a store on the host; see LayerKV.

    leader: the anchor whose index and selections this layer follows; None: it has its own. plan: the sizes, None before the first
    prompt.
    """

    store: HostStore
    slab: Slab
    storage: LayerStorage
    sparse: SparseAttention
    everything = False  # attended to where it lies, without an index; see FullLayer

    def __init__(
        self, number: int, settings: Settings, streams: Streams, sequences: Sequences, preallocator: BlockPreallocator,
        leader: OffloadedLayer | None = None,
    ) -> None:  # fmt: skip
        self.number, self.settings, self.streams, self.sequences, self.leader = number, settings, streams, sequences, leader
        self.preallocator = preallocator
        self.retriever: Retriever | None = None
        self.rotary: Rotary | None = None  # for a method that asks for it
        self.reset()

    def reset(self) -> None:
        self.drop_search()
        for part in ("store", "slab", "storage", "sparse"):
            self.__dict__.pop(part, None)
        self.retriever, self.scale, self.asked_again = None, 0.0, 0  # asked_again: decode steps with another layer's queries
        self.plan: Plan | None = None
        self.recent_queries: dict[int, Tensor] = {}
        self._before: tuple[Step | None, dict[int, Tensor], Tensor | None] = None, {}, None  # a prefill; what was before it
        self._taken: tuple[Step | None, int] = None, 0
        self._prompts: dict[int, int] = {}  # where the rings begin of sequences whose prompts ended with the latest prefill
        self.given: Given | None = None  # of a prefill, which append() has yet to store and index
        self.extremes: list[Tensor] = []  # of keys and values of prompts, not known to be finite

    # Reading

    def length(self, seq: int) -> int:
        step, taken = self._taken
        under_way = step is not None and step is self.sequences.step and step.seq is None
        return step.lengths(taken)[seq] if step is not None and under_way else self.sequences.length(seq)

    def indexed(self, seq: int) -> int:
        """Return where the sequence's ring begins: positions [sink, this) are in the retrieval region."""
        return self.sequences.indexed(seq, self.length(seq))

    def read(self, seq: int, start: int, stop: int) -> Tensor:
        return self.storage.offloader.read(seq, start, stop)

    def nonfinite(self) -> Tensor | None:
        return self.slab.tickets[:1] if self.plan else None

    def device_bytes(self) -> int:
        """Return the bytes of KV on the device: sink, ring, pool and blocks."""
        return self.slab.data.nbytes + self.store.nbytes(on_device=True) if self.plan else 0

    def fixed_bytes(self) -> int:
        return self.sparse.fixed_bytes() if self.plan else 0

    def host_bytes_per_token(self) -> int:
        """Return the bytes of host memory that a token takes; 0 where tokens are evicted, and before the first prompt."""
        return self.store.kv_heads * self.store.row_bytes if self.plan and self.storage.offloader.keeps else 0

    def host_bytes(self, seq: int | None = None) -> int:
        return self.store.nbytes(seq) if self.plan else 0

    @property
    def chooses(self) -> bool:
        """Whether this layer has an index of its own, where the method has one."""
        return self.leader is None

    def tensors(self) -> list[Tensor]:
        return self.sparse.tensors() if self.plan else []

    # Prompts

    def allocate(self, step: Step, query: Tensor, key: Tensor, scale: float) -> None:
        """Make the parts by the sizes of the first tokens: query [., Hq, T, D], key [., H, T, D]."""
        plan, count = self.settings.plan(step.longest, self.sequences.limit), len(step.left_pad)
        plan = Plan(plan.regions, rows=0) if self.everything else plan
        method, (_, heads, _, dim), self.scale = self.settings.method, key.shape, scale
        self.storage = LayerStorage(count, key, plan, self.settings, self.streams, self.preallocator)
        self.store, self.slab = self.storage.store, self.storage.slab
        transfer: Transfer | None = None
        if method.index is not None and not self.everything:
            transfer = (method.transfer or UvaGather)()
            if transfer.graph_safe and key.is_cpu:
                transfer = BulkCopy()
            if isinstance(transfer, PagedCopy):
                self.store.keep_pages()
            if self.leader is None:
                context = IndexContext(
                    self.number, query.shape[1], heads, dim, key.dtype, key.device, self.store, plan.regions, scale,
                    seed=self.settings.seed, rows=plan.rows, slab=self.slab, sequences=self.sequences, aux=self.streams.aux,
                    deferred=self.streams.deferred, rotary=self.rotary, ranks=self.settings.ranks,
                )  # fmt: skip
                self.retriever = Retriever(method, context, count, plan.rows, self.streams)
                self.storage.updater = IndexUpdater(self.retriever, self.store, self.slab)
            else:
                self.retriever = self.leader.retriever
        if self.everything or (transfer is not None and not self.on_host and (transfer.graph_safe or key.is_cpu)):
            self.storage.place_on_device(self.number)  # what the host reads stays there
        how = {"selects": self.chooses, "everything": self.everything}
        self.sparse = SparseAttention(self.storage, self.sequences, self.retriever, transfer, **how)
        self.plan = plan
        self.sparse.make_room(self.sequences.capacity)
        self.streams.device.fixed[self.number] = self.fixed_bytes()

    def prefill(self, step: Step, query: Tensor, key: Tensor, value: Tensor, attention: AttentionParams) -> Tensor:
        self.drop_search()
        if self.plan is None:
            self.allocate(step, query, key, attention.scale)
        passed, ends = dict[int, Tensor](), self.sequences.announced and not step.remaining
        out = self._attend_dense(step, query, key, value, attention, passed if ends else None)
        self._take(step, query, key, value, passed)
        if key.nbytes > SHORT or len(key) > 1 or passed or self.on_host:
            append([self])
        return out

    def _attend_dense(
        self, step: Step, query: Tensor, key: Tensor, value: Tensor, attention: AttentionParams,
        passed: dict[int, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Causal attention over all earlier tokens and the new ones, exact. passed: receives the rows [H, n, 2, D] of sequences
        that are to be indexed whole with this step, where the new ones are yet to be written; see LayerStorage.indexes_whole."""
        if step.start == 0 and (step.seq is not None or not any(step.left_pad)):
            return attention.causal(query, key, value)

        def attend(row: Row, q: Tensor) -> Tensor:
            k, v = (x[row.row : row.row + 1, :, row.pad :] for x in (key, value))
            if row.past == 0:
                return attention.causal(q, k, v)
            past = self.storage.offloader.past(row.seq, row.past, self.sequences.indexed(row.seq), q.shape[2])
            if passed is not None and self.storage.indexes_whole(row.seq) and row.seq not in self.sequences.paused:
                passed[row.seq] = k.new_empty((k.shape[1], row.past + k.shape[2], 2, k.shape[3]))
                past = copied(past, passed[row.seq])
            return continued(q, k, v, past, scale=attention.scale, softcap=attention.softcap, sinks=attention.sinks)

        return attend_rows(step, query, attend)

    def append(self, step: Step, query: Tensor, key: Tensor, value: Tensor) -> None:
        self._take(step, query, key, value, {})
        append([self])

    def _take(self, step: Step, query: Tensor, key: Tensor, value: Tensor, passed: Mapping[int, Tensor]) -> None:
        """Take what append() is to store and index."""
        ring = self.slab.held().clone() if step.start and self.settings.method.evicts else None
        self._before = step, dict(self.recent_queries), ring
        last = take_queries(step, query, self.recent_queries, self.storage.prompt_queries)
        self.given = Given(step, key, value, last, passed)

    def appended(self, given: Given, ends: Mapping[int, int]) -> None:
        self._taken = given.step, given.step.tokens
        self._prompts = dict(ends) if self.sequences.announced and not given.step.remaining else {}
        self.storage.index_ahead(self._prompts, self.recent_queries, given.passed)

    def resume(self, step: Step, blocks: Mapping[int, Sequence[Block]], kept: Mapping[int, Snapshot]) -> None:
        """Take the first tokens of sequences from blocks of rows that are kept; see LayerStorage.resume."""
        self._before, self._prompts = (step, dict(self.recent_queries), None), {}
        for row in step.rows():
            length = row.past + step.tokens - row.pad
            self.storage.resume(row.seq, blocks[row.seq], length, kept.get(row.seq), alone=step.seq is None)
        self._taken = step, step.tokens

    def commit(self) -> None:
        """Index what a prefill appended, where the index waits until the step is certain."""
        if self.plan is not None and self.storage.updater is not None:
            self.storage.updater.commit(self.sequences.paused)
            self.storage.updater.renew(self._prompts, self.recent_queries, self.sequences.paused)

    # Decoding

    def decode(self, step: Step, query: Tensor, key: Tensor, value: Tensor, attention: AttentionParams) -> Tensor:
        if self.retriever is not None and self.chooses:
            self.retriever.choices.clear()
        outs = []
        for t in range(step.tokens):
            if t and self.sequences.full(t):
                flush([self], self.sequences.leaving(t))
                self.before_step()
            self._taken = step, t + 1
            self.sequences.place(step, t, self.slab.data.device)
            outs.append(self._attend(step, t, query[:, :, t], (key[:, :, t], value[:, :, t]), attention))
        self.drop_search()
        return torch.stack(outs, dim=2) if step.tokens > 1 else outs[0][:, :, None]

    def attend_again(self, step: Step, query: Tensor, key: Tensor, value: Tensor, attention: AttentionParams) -> Tensor:
        if step.dense:
            return self._attend_dense(step, query, key, value, attention)
        self.asked_again += 1
        self.sequences.place_committed(self.slab.data.device)
        out = self._attend(None, 0, query[:, :, 0], (key[:, :, 0], value[:, :, 0]), attention)
        if self.retriever is not None and self.chooses:
            self.retriever.meter.tick(self.sequences.live_count)
        return out[:, :, None]

    def _attend(self, step: Step | None, t: int, query: Tensor, newest: Newest, attention: AttentionParams) -> Tensor:
        out, choice = self.sparse.attend(step, t, query, newest, attention)
        for observer in self.streams.observers:
            observer(self, query, choice)
        return out

    # Queries that are known before the layer runs

    def asks(self, tokens: int) -> bool:
        """Return whether this layer's own index selects rows for a step of so many tokens."""
        return self.retriever is not None and self.chooses and self.sequences.decodes(tokens)

    def prefetch(self, queries: Tensor) -> None:
        """Search with these queries, [B, Hq, T, D], instead of the next tokens' own. An index on the host starts at once, beside
        the layer before, with the tokens that come before the index changes."""
        assert self.retriever is not None
        self.retriever.prefetch(queries, self.undisturbed(queries.shape[2]) if self.on_host else 0)

    def undisturbed(self, tokens: int) -> int:
        """Return how many of the next tokens come before tokens leave a ring, so that the index does not change."""
        return self.storage.undisturbed([self.sequences.leaving(t) for t in range(tokens)])

    def drop_search(self) -> None:
        """Drop the predicted queries and their searches."""
        if self.retriever is not None and self.chooses:
            self.retriever.drop_search()

    # Between steps

    @property
    def on_host(self) -> bool:
        """Whether the layer's index works on the host, beside the device."""
        return self.retriever is not None and self.retriever.index.on_host

    @property
    def can_run_ahead(self) -> bool:
        """Whether rollback() undoes run_ahead() exactly. A tree on the host forgets what it was given, but for its shape."""
        if self.on_host:
            return not self.asked_again
        return self.storage.updater is None or self.storage.updater.reversible

    def renew(self, rings: Mapping[int, int]) -> None:
        """Check what prompts brought, and index again sequences that ask for it. rings: where those of all that decode begin."""
        if self.plan is None:
            return
        self.check_finite()
        if not self.sequences.paused:
            self.streams.prefetcher.release()
        if self.storage.updater is not None:
            self.storage.updater.renew(rings, self.recent_queries)

    def before_step(self) -> None:
        """See LayerKV. Afterwards a step of one token runs on the device alone if the index is graph-safe."""
        if self.plan is None:
            return
        self.storage.trim_queries(self.recent_queries, self.sequences.idle)
        self.sparse.wait_on_stream()
        self.plan = self.sparse.grow(self.settings, self.plan)
        self.sparse.make_room(self.sequences.capacity)
        if self.retriever is not None and not self.on_host:
            self.retriever.wait()
        self.sparse.update_table()

    def reserved(self, seq: int) -> int:
        """Return the number of tokens of a sequence that its blocks on the host have room for."""
        return self.store.reserved(seq) if self.plan and seq < self.store.seqs else 0

    def reserve_blocks(self, ends: Mapping[int, int]) -> None:
        if self.plan is not None:
            self.storage.reserve(ends)

    def preallocate(self, seq: int) -> None:
        """Allocate the block that a sequence needs before its next turn, and move blocks between device and host."""
        self.storage.preallocate(seq, self.sequences.length(seq))
        self.sparse.update_table()

    def check_finite(self) -> None:
        """Raise CacheError where a prompt's keys or values were not finite."""
        PromptCheck([self]).wait()
        self.extremes = []

    def wait(self) -> None:
        if self.plan is not None:
            self.check_finite()
            self.storage.wait()

    # Changes from outside

    def recover(self) -> None:
        if self.retriever is not None and self.chooses:
            self.retriever.recover()

    def rollback(self, failed: Step | None, *, repeated: bool = False, ahead: bool = False) -> None:
        if not repeated:
            self.drop_search()
        self.given = None
        if self.plan is None:
            return
        if failed is not None and self.storage.updater is not None:
            self.storage.updater.drop()
        if failed is not None and not repeated and self.retriever is not None and self.chooses:
            self.retriever.forget_step()
        if failed is not None and not repeated and self._before[0] is failed:
            _, self.recent_queries, ring = self._before
            if ring is not None:
                self.slab.held().copy_(ring)
            self._before, self.extremes = (None, {}, None), []
        for seq in range(self.store.seqs):
            own = failed if failed is not None and not repeated and failed.seq in (None, seq) else None
            length = self.sequences.length(seq) if seq < self.sequences.count else 0
            if length == 0:
                if own is not None:
                    self.clear(seq)
                continue
            start = self.sequences.indexed(seq, length + (ahead and (own is None or own.seq is None)))
            self.storage.rollback(seq, start, length, own)

    def check_crop(self, drop: int) -> None:
        if self.plan is None or not self.settings.method.evicts:
            return
        sequences, sink = self.sequences, self.plan.regions.sink
        for seq in range(sequences.count):
            if max(0, sequences.length(seq) - drop) < sequences.indexed(seq) > sink:
                raise CacheError(f"{self.settings.method.name} has dropped the tokens that crop({-drop}) would bring back")

    def crop(self, seq: int, start: int, length: int, *, exactly: bool = False) -> None:
        """See LayerKV. The ring is refilled from the store."""
        if self.plan is None:
            return
        self.slab.tickets.zero_()
        if self.settings.method.evicts:
            return
        own = self.sequences
        self.storage.crop(seq, start, length, own.indexed(seq), own.length(seq), exactly=exactly)

    def clear(self, seq: int) -> None:
        if self.plan is None:
            return
        self.drop_search()
        self.extremes = []
        self.storage.clear(seq)
        self._prompts.pop(seq, None)
        self.recent_queries.pop(seq, None)

    @property
    def home(self) -> LayerStorage | None:
        return self.storage if self.plan else None

    def swap_out(self, seq: int, memory: HostMemory) -> SwappedLayer:
        return self.storage.swap_out(seq, self.recent_queries.get(seq))

    def swap_in(self, seq: int, swapped: SwappedLayer) -> None:
        self.storage.swap_in(seq, swapped)
        if swapped.queries is not None:
            self.recent_queries[seq] = swapped.queries.to(self.slab.data.device)

    def reorder(self, sequences: Sequence[int]) -> None:
        if self.plan is None:
            return
        self.drop_search()
        self.storage.reorder(sequences)
        self.sparse.reorder()
        self.recent_queries = reordered(self.recent_queries, sequences)
