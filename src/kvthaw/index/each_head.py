"""A DCI-tree that every query head searches on its own budget, instead of cutting the union of the heads' results."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvthaw.index.forest import TreeIndex
from kvthaw.index.joined import joined


class EachHeadTreeIndex(TreeIndex, tested=True):
    """TreeIndex whose G query heads of a KV head each find budget / G rows; all of them attend to the union, which is not cut.

    Where the budget holds all tokens of a sequence, they attend to all.
    """

    def search(self, query: Tensor, rows: Tensor, counts: Tensor, budget: int) -> Callable[[], None]:
        batch, heads, group = query.shape[0], self.context.kv_heads, self.context.group
        own = torch.empty((group, batch, heads, query.shape[2]), dtype=torch.float32)
        share = max(1, budget // group)
        found = torch.empty((group, batch, heads, share), dtype=torch.int32)
        held = torch.empty((group, batch, heads), dtype=torch.int32)
        searches = [super(EachHeadTreeIndex, self).search(*each, share) for each in zip(own, found, held, strict=True)]

        def select() -> None:
            own.copy_(query.unflatten(1, (heads, group)).movedim(2, 0))
            for search in searches:
                search()
            union = joined(found.movedim(0, 2).contiguous(), budget)
            rows.copy_(union.rows)
            counts.copy_(union.counts)
            for seq in range(batch):
                if (size := self.forest.size(seq)) <= budget:
                    rows[seq] = -1
                    rows[seq, :, :size] = torch.arange(size, dtype=torch.int32) + self.forest.first(seq)
                    counts[seq] = size

        return select
