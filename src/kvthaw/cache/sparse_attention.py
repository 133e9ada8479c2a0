"""A decode step of one layer: select rows, fetch the missing ones, attend."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvthaw.cache.choice import BulkCopy, Choice, UvaGather
from kvthaw.cache.index_api import IndexContext, Method, Transfer
from kvthaw.cache.index_updater import IndexUpdater
from kvthaw.cache.layer_base import AttentionParams, RecentQueries
from kvthaw.cache.layer_storage import LayerStorage
from kvthaw.cache.retriever import HostRetriever, Retriever
from kvthaw.cache.sequences import Sequences
from kvthaw.cache.step import Step
from kvthaw.errors import ConfigError
from kvthaw.kernels.decode_step import DecodeStep, InSlab
from kvthaw.kernels.in_place import Every, InPlace, Selected
from kvthaw.kernels.places import Newest
from kvthaw.kernels.sparse_decode import sparse_decode

Rows = tuple[Choice | None, Selected | Every | Tensor | None, dict[str, Any]]
"""A choice; where attention finds its rows, or the visible slots; and weights and partials, as for DecodeStep."""


class HeldAttention:
    """Attention of a decode step to sink and ring, for a method that retrieves nothing.

    retriever: selects rows; None: there are no others.
    updater: feeds its index; None if another layer's queries select the rows.
    """

    retriever: Retriever | None = None
    updater: IndexUpdater | None = None

    def __init__(self, storage: LayerStorage, sequences: Sequences) -> None:
        self.storage, self.sequences = storage, sequences

    def attend(
        self, step: Step | None, t: int, query: Tensor, newest: Newest, attention: AttentionParams
    ) -> tuple[Tensor, Choice | None]:
        """Attend with token t of a step of the first B sequences. Returns the output [B, Hq, D] and the choice.

        step: None for the queries of another layer, which are no step of their own.
        query: [B, Hq, D].
        newest: key and value [B, H, D] of the token, which the kernel writes to the ring.
        """
        choice, chosen, how = self._rows(step, t, query, attention)
        slab, on_device, own = self.storage.slab, self.sequences.on_device, slice(len(query))
        how |= {"scale": attention.scale, "softcap": attention.softcap, "sinks": attention.sinks}
        held = slab.regions, on_device.lengths[own], on_device.starts[own], newest
        places = InPlace(*held, chosen) if isinstance(chosen, Selected | Every) else InSlab(*held, chosen)
        decode_step = DecodeStep(query, slab.data[own, :, :, 0], slab.data[own, :, :, 1], **how)
        return sparse_decode(decode_step, places, slab.tickets), choice

    def _rows(self, step: Step | None, t: int, query: Tensor, attention: AttentionParams) -> Rows:
        """Choose the rows besides sink and ring, and fetch the missing ones."""
        return None, None, {}


class SparseAttention(HeldAttention):
    """Attention of a decode step to sink, ring and the rows that a retriever selects."""

    retriever: Retriever

    def __init__(
        self,
        storage: LayerStorage,
        sequences: Sequences,
        retriever: Retriever,
        transfer: Transfer,
        updater: IndexUpdater | None,
    ) -> None:
        super().__init__(storage, sequences)
        self.retriever, self.transfer, self.updater = retriever, transfer, updater

    def _rows(self, step: Step | None, t: int, query: Tensor, attention: AttentionParams) -> Rows:
        retriever, transfer, slab, how = self.retriever, self.transfer, self.storage.slab, dict[str, Any]()
        if self.updater is None:
            choice = retriever.choices[t].followed
        else:
            longest = self.sequences.longest if step is None else step.start + t + 1 - min(step.left_pad)
            choice = retriever.choose(query, longest, t)
        if choice.slots is not None and choice.fetch is not None:
            slots, fetch = choice.host if choice.host and not transfer.graph_safe else (choice.slots, choice.fetch)
            transfer.fetch(self.storage.store, slab, fetch, slots)
            if self.updater is not None and retriever.index.traits.rebuilds:
                retriever.index.rebuild(slab, choice.fetch, choice.slots)
        selection, reads = choice.selection, retriever.reads_blocks
        if selection.partial is not None:
            if attention.softcap is not None:
                raise ConfigError(
                    f"{retriever.method.name} attends to some tokens itself, without the softcap of {attention.softcap} "
                    "that the model has; it works with models that have none"
                )
            selection.partial.wait()
            how["partials"] = [selection.partial]
        if selection.log_weight is not None:
            how["log_weight"] = self._by_place(selection.log_weight, None if reads else choice.slots)
        return choice, self._selected(choice) if reads else choice.live, how

    def _selected(self, choice: Choice) -> Selected:
        """Return the rows of a choice and where they lie in this layer."""
        selection, store = choice.selection, self.storage.store
        counts = selection.counts, self.retriever.residency.counts
        tally = counts if choice.slots is None and self.updater is not None else None
        rows = selection.rows.contiguous()
        return Selected(rows, choice.slots, self.storage.table()[: len(rows)], store.block_size, tally, store.format)

    def _by_place(self, log_weight: Tensor, slots: Tensor | None) -> Tensor:
        """Scatter log_weight [B, Hq, M] to the slab's slots, [B, Hq, N], by the rows' slots; 0 elsewhere.

        slots: None: the rows follow sink and ring in order.
        """
        batch, q_heads, _ = log_weight.shape
        slab = self.storage.slab
        if slots is None:
            return F.pad(log_weight, (slab.pool_start, 0))
        heads, places = slab.data.shape[1:3]
        slot = torch.where(slots >= 0, slots + slab.pool_start, places).to(log_weight.device).long()
        slot = slot.repeat_interleave(q_heads // heads, dim=1)
        spread = torch.zeros((batch, q_heads, places + 1), dtype=torch.float32, device=log_weight.device)
        return spread.scatter_(2, slot, log_weight)[:, :, :places]


class FullAttention(HeldAttention):
    """Attention of a decode step to sink, ring and all other rows, where they lie."""

    def _rows(self, step: Step | None, t: int, query: Tensor, attention: AttentionParams) -> Rows:
        store, table, sequences = self.storage.store, self.storage.table(), self.sequences
        most = sequences.bucket(len(query)) if table.is_cuda else sequences.longest  # equal in all steps of a bucket
        return None, Every(most, table[: len(query)], store.block_size, store.format), {}


def make_attention(
    method: Method, storage: LayerStorage, context: IndexContext, sequences: Sequences, recent: RecentQueries,
    leader: Retriever | None,
) -> HeldAttention:  # fmt: skip
    """Return the attention of a layer, with its index unless it follows another, and place its blocks.

    recent: the last queries of the layer's prompts.
    leader: the retriever of the layer that it follows; None: it has its own.
    """
    if method.index is None:
        return HeldAttention(storage, sequences)
    on_cpu, transfer = context.device.type == "cpu", (method.transfer or UvaGather)()
    if transfer.graph_safe and on_cpu:
        transfer = BulkCopy()
    retriever, updater = leader, None
    if retriever is None:
        index = method.make_index(context)
        kind = HostRetriever if index.traits.on_host else Retriever
        retriever = kind(method, index, context, sequences, storage.store.seqs, storage.streams)
        updater = IndexUpdater(retriever, storage.store, storage.slab, sequences, recent)
    traits = retriever.index.traits
    if not traits.on_host and (transfer.graph_safe or on_cpu):  # what the host reads stays there
        storage.place_on_device(context.layer)
    if updater is not None:
        fetches = traits.rebuilds or method.transfer is not None
        retriever.reads_blocks = storage.placement is not None and not fetches
    storage.tabled = retriever.reads_blocks or isinstance(transfer, UvaGather)
    return SparseAttention(storage, sequences, retriever, transfer, updater)
