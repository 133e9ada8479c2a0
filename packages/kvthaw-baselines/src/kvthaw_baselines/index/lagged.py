"""Pages found by the query of the token before (FreeKV, sections 3.2 and 3.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvthaw.cache.index_api import IndexContext, Selection
from kvthaw.errors import within
from kvthaw.index.bounds import BoundIndex
from kvthaw.index.tables import Column
from kvthaw.kernels.page_bounds import Spread
from kvthaw.kernels.unit_select import Policy

_KEPT = 64


class LaggedIndex(BoundIndex, tested=True):
    """Bounded pages, ranked for the previous token's query where this token's points the same way.

    A KV head whose group has a mean cosine of at least tau between the two queries gets the previous query's pages. The
    others are corrected: they get the pages of their own query. A sequence's first step after a dense pass has no previous
    query and is corrected whole.

    previous: [B, 64, Hq, D], the query at n tokens of the sequence in place n modulo 64. Dropped tokens (assisted decoding)
        therefore leave the query before them.
    asked: [B, 64] int64, n + 1 of each place, 0 for none.
    """

    previous = Column()
    asked = Column()

    def __init__(self, context: IndexContext, *, page: int, spread: Spread, policy: Policy, tau: float) -> None:
        within(-1, 1, tau=tau)
        super().__init__(context, page=page, spread=spread, policy=policy)
        self.tau = tau
        self.tables.add("previous", (_KEPT, context.q_heads, context.head_dim), context.dtype)
        self.tables.add("asked", (_KEPT,), torch.int64)

    def build(self, seq: int, first: int, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        super().build(seq, first, keys, values, queries)
        self.asked[seq] = 0

    def select(self, query: Tensor, budget: int) -> Selection:
        batch = query.shape[0]
        self.reserve(batch)
        seqs = torch.arange(batch, device=query.device)
        now = (
            self.asked[:batch].amax(dim=1)
            if self.context.sequences is None
            else self.context.sequences.on_device.lengths[:batch].long()
        )
        before = (now - 1) % _KEPT
        previous, asked = self.previous[seqs, before], self.asked[seqs, before]
        near = torch.cosine_similarity(query.float(), previous.float(), dim=2).unflatten(1, (self.context.kv_heads, -1))
        lags = (near.mean(dim=2) >= self.tau) & (asked == now)[:, None] & (now > 0)[:, None]
        used = torch.where(lags.repeat_interleave(self.context.group, dim=1)[:, :, None], previous, query)
        selection = super().select(used, budget)
        self.previous[seqs, now % _KEPT] = query
        self.asked[seqs, now % _KEPT] = now + 1
        return selection
