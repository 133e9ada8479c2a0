"""Clusters chosen by every query head for itself, where others choose once for the query heads of a KV head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvthaw.cache.index_api import Selection
from kvthaw.index.clusters import ClusterIndex
from kvthaw.index.joined import joined


class QueryHeadClusterIndex(ClusterIndex, tested=True):
    """ClusterIndex whose G query heads of a KV head each take the best clusters up to budget / G rows, and attend to these alone.

    Where the budget holds all tokens of a sequence, every head attends to all.
    """

    def select(self, query: Tensor, budget: int) -> Selection:
        batch, heads = query.shape[0], self.context.kv_heads
        grouped = query.unflatten(1, (heads, -1))
        share = max(1, budget // grouped.shape[2])
        rows = [super(QueryHeadClusterIndex, self).select(one, share).rows for one in grouped.unbind(2)]
        chosen = joined(torch.stack(rows, dim=2), budget)
        assert chosen.log_weight is not None
        tokens = self.stops[:batch].gather(2, self.counts[:batch, None, None].long().expand(-1, heads, 1))
        every = F.pad(self.order[:batch, :, :budget], (0, max(0, budget - self.order.shape[2])))
        every = every.masked_fill(torch.arange(budget, device=query.device) >= tokens, -1)
        fits = tokens <= budget
        found = torch.where(fits, every, chosen.rows)
        seen = fits.expand(-1, heads, grouped.shape[2]).flatten(1)[:, :, None]
        log_weight = chosen.log_weight.masked_fill(seen, 0.0)
        return Selection(found, (found >= 0).sum(dim=2, dtype=torch.int32), log_weight)
