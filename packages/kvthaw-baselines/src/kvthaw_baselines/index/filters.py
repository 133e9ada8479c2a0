"""OmniKV's filter layers: they attend to everything, and their weights select rows for other layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvthaw.cache.index_api import IndexContext, Selection
from kvthaw.index.tokens import TokenIndex
from kvthaw.kernels.decode_step import AnyOrder, DecodeStep
from kvthaw.kernels.flash_decode import definition as attend


class FilterIndex(TokenIndex, tested=True):
    """The tokens of the largest softmax weight over all query heads of a layer: the same rows for every KV head.

    dense: keys and values of the layer stay on the device, [B, H, capacity, D] each, and the layer attends to all of them: to those
    that it did not choose by the selection's partial, outside the budget, which knows of no softcap. Else only keys stay.
    """

    def __init__(self, context: IndexContext, *, dense: bool = True) -> None:
        self.dense, self.traits = dense, replace(TokenIndex.traits, attends=dense)
        names = ("keys", "values") if dense else ("keys",)
        super().__init__(context, columns=dict.fromkeys(names, ((context.head_dim,), context.dtype)))

    def encode(self, seqs: Sequence[int], keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        return {"keys": keys, "values": values} if self.dense else {"keys": keys}

    def select(self, query: Tensor, budget: int) -> Selection:
        tokens, batch, heads = self.ready(query), query.shape[0], self.context.kv_heads
        keys = self.tables["keys"][:batch, :, :tokens]
        weights = self.weigh(query.unflatten(1, (heads, -1)) @ keys.transpose(2, 3))
        merged = self.context.ranks.gather(weights.amax(dim=2), 1).amax(dim=1, keepdim=True)
        chosen = self.best(merged, budget)
        rows, counts = chosen.rows.expand(-1, heads, -1).contiguous(), chosen.counts.expand(-1, heads).contiguous()
        if not self.dense:
            return Selection(rows, counts)
        rest = torch.nn.functional.pad(self.held(batch, tokens).expand(-1, heads, -1), (0, 1))
        rest.scatter_(2, torch.where(rows >= 0, rows - self.first, tokens).long(), False)
        values = self.tables["values"][:batch, :, :tokens]
        step = DecodeStep(query, keys, values, scale=self.scale)
        return Selection(rows, counts, partial=attend(step, AnyOrder(rest[:, :, :tokens])))
