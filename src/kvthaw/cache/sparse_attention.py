"""A decode step of one layer: select rows, fetch the missing ones, attend."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvthaw.cache.choice import Choice
from kvthaw.cache.index_api import Transfer
from kvthaw.cache.layer_base import AttentionParams
from kvthaw.cache.layer_storage import LayerStorage
from kvthaw.cache.retriever import Retriever
from kvthaw.cache.sequences import Sequences
from kvthaw.cache.step import Step
from kvthaw.cache.transfer import fetch_choice
from kvthaw.errors import ConfigError
from kvthaw.kernels.decode_step import DecodeStep, InSlab
from kvthaw.kernels.in_place import Every, InPlace, Selected
from kvthaw.kernels.places import Newest
from kvthaw.kernels.sparse_decode import sparse_decode


class SparseAttention:
    """Attention of a decode step to sink, ring and the rows that a retriever selects.

    retriever, transfer: None for a method that retrieves nothing.
    selects: this layer's queries select the rows; else the anchor's selection is used.
    everything: attend to all rows where they lie, without a retriever.
    """

    def __init__(
        self,
        storage: LayerStorage,
        sequences: Sequences,
        retriever: Retriever | None,
        transfer: Transfer | None,
        *,
        selects: bool,
        everything: bool = False,
    ) -> None:
        self.storage, self.sequences, self.retriever, self.transfer = storage, sequences, retriever, transfer
        self.everything = everything
        self.own = retriever if selects else None
        if self.own is not None:
            fetches = self.own.index.traits.rebuilds or self.own.method.transfer is not None
            self.own.reads_blocks = storage.placement is not None and not fetches

    def attend(
        self, step: Step | None, t: int, query: Tensor, newest: Newest, attention: AttentionParams
    ) -> tuple[Tensor, Choice | None]:
        """Attend with token t of a step of the first B sequences. Returns the output [B, Hq, D] and the choice.

        step: None for the queries of another layer, which are no step of their own.
        query: [B, Hq, D].
        newest: key and value [B, H, D] of the token, which the kernel writes to the ring.
        """
        slab, choice, visible, log_weight, partials = self.storage.slab, None, None, None, []
        seqs, on_device = len(query), self.sequences.on_device
        selected: Selected | Every | None = self._all(seqs) if self.everything else None
        if self.retriever is not None and self.transfer is not None:
            choice = self._choose(self.retriever, step, query, t)
            fetch_choice(self.transfer, choice, self.storage.store, slab, None if self.own is None else self.own.index)
            selection, reads = choice.selection, self.retriever.reads_blocks
            selected, visible = self._selected(self.retriever, choice) if reads else None, None if reads else choice.live
            if selection.partial is not None:
                if attention.softcap is not None:
                    raise ConfigError(
                        f"{self.retriever.method.name} attends to some tokens itself, without the softcap of {attention.softcap} "
                        "that the model has; it works with models that have none"
                    )
                selection.partial.wait()
                partials.append(selection.partial)
            if selection.log_weight is not None:
                log_weight = self._by_place(selection.log_weight, None if reads else choice.slots)
        decode_step = DecodeStep(
            query, slab.data[:seqs, :, :, 0], slab.data[:seqs, :, :, 1], scale=attention.scale, softcap=attention.softcap,
            sinks=attention.sinks, log_weight=log_weight, partials=partials,
        )  # fmt: skip
        held = slab.regions, on_device.lengths[:seqs], on_device.starts[:seqs], newest
        places = InSlab(*held, visible) if selected is None else InPlace(*held, selected)
        return sparse_decode(decode_step, places, slab.tickets), choice

    def _choose(self, retriever: Retriever, step: Step | None, query: Tensor, t: int) -> Choice:
        if self.own is None:
            return retriever.choices[t].followed
        longest = self.sequences.longest if step is None else step.start + t + 1 - min(step.left_pad)
        return retriever.choose(query, longest, t)

    def _selected(self, retriever: Retriever, choice: Choice) -> Selected:
        """Return the rows of a choice and where they lie in this layer."""
        selection, store = choice.selection, self.storage.store
        counts = selection.counts, retriever.residency.counts
        tally = counts if choice.slots is None and self.own is not None else None
        rows = selection.rows.contiguous()
        self.storage.order()
        return Selected(rows, choice.slots, self._table()[: len(rows)], store.block_size, tally, store.format)

    def _all(self, seqs: int) -> Every:
        """Return all rows of the first `seqs` sequences. Their upper bound is equal in all steps of a bucket
        (Sequences.bucket)."""
        self.storage.order()
        table, store = self._table(), self.storage.store
        most = self.sequences.bucket(seqs) if table.is_cuda else self.sequences.longest
        return Every(most, table[:seqs], store.block_size, store.format)

    def _table(self) -> Tensor:
        """Return the current block table on the device."""
        return self.storage.store.table.on(self.storage.slab.data.device)

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
