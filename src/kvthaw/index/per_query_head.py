"""A choice of its own for every query head, where others make one for the query heads of a KV head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvthaw.cache.index_api import Selection
from kvthaw.index.clusters import ClusterIndex

_NONE = torch.iinfo(torch.int32).max


def joined(rows: Tensor, budget: int) -> Selection:
    """Join the rows [B, H, G, m] that the query heads of each KV head chose, -1 padded, into one selection of `budget` rows.

    A row that several heads chose stands once; log_weight hides it from the heads that did not choose it. Of more than `budget`
    rows the first in text order stay. Static shapes, no host sync.
    """
    own = torch.where(rows >= 0, rows, _NONE).sort(dim=3).values
    every = own.flatten(2).sort(dim=2).values
    again = torch.zeros_like(every, dtype=torch.bool)
    again[:, :, 1:] = every[:, :, 1:] == every[:, :, :-1]
    every = every.masked_fill(again, _NONE).sort(dim=2).values[:, :, :budget]
    every = F.pad(every, (0, budget - every.shape[2]), value=_NONE)
    wanted = every[:, :, None].expand(-1, -1, own.shape[2], -1).contiguous()
    place = torch.searchsorted(own, wanted).clamp(max=own.shape[3] - 1)
    hidden = (own.gather(3, place) != wanted) & (wanted != _NONE)
    log_weight = torch.zeros(wanted.shape, device=rows.device).masked_fill(hidden, -torch.inf)
    found = every != _NONE
    return Selection(torch.where(found, every, -1), found.sum(dim=2, dtype=torch.int32), log_weight.flatten(1, 2))


class QueryHeadClusterIndex(ClusterIndex):
    """ClusterIndex whose G query heads of a KV head each take the best clusters up to budget / G rows, and attend to these alone.

    Where the budget holds all tokens of a sequence, every head attends to all.
    """

    def select(self, query: Tensor, budget: int) -> Selection:
        """See Index."""
        batch, heads = query.shape[0], self.context.kv_heads
        grouped = query.unflatten(1, (heads, -1))
        share = max(1, budget // grouped.shape[2])
        rows = [super(QueryHeadClusterIndex, self).select(one, share).rows for one in grouped.unbind(2)]
        chosen = joined(torch.stack(rows, dim=2), budget)
        assert self.order is not None and chosen.log_weight is not None
        tokens = self.stops[:batch].gather(2, self.counts[:batch, None, None].long().expand(-1, heads, 1))
        every = F.pad(self.order[:batch, :, :budget], (0, max(0, budget - self.order.shape[2])))
        every = every.masked_fill(torch.arange(budget, device=query.device) >= tokens, -1)
        fits = tokens <= budget
        found = torch.where(fits, every, chosen.rows)
        seen = fits.expand(-1, heads, grouped.shape[2]).flatten(1)[:, :, None]
        log_weight = chosen.log_weight.masked_fill(seen, 0.0)
        return Selection(found, (found >= 0).sum(dim=2, dtype=torch.int32), log_weight)
