"""A few skewed channels of every key, and a threshold below the best: InfiniGen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvthaw.cache.index_api import IndexContext, Selection
from kvthaw.errors import ConfigError, proportion
from kvthaw.index.tokens import TokenIndex
from kvthaw_baselines.index.principal import principal


class SkewedIndex(TokenIndex, tested=True):
    """Tokens whose estimated logit is within alpha of the best, by `ratio` of the channels of skewed queries and keys.

    A KV head's skew is the orthogonal V of the singular value decomposition of its group's last prompt queries. Skewing
    both leaves q.k unchanged. The kept channels have the largest sum of mean absolute values over these queries and over
    the prompt's keys. A token counts for a KV head if it counts for one of its query heads. Every KV head selects the
    layer's mean number of counting tokens, rounded up, nearest first to some query head's best. The number is limited by
    the share `most` of the sequence and by the budget. If the budget holds the whole sequence, all tokens are selected.

    Not graph-safe: its queries may come from a hook of the model, which a captured step does not run.

    partial: [B, H, capacity, R], the kept channels of keys.
    skew: [B, H, D, R] float32.
    """

    traits = replace(TokenIndex.traits, graph_safe=False, grows=False)

    def __init__(self, context: IndexContext, *, ratio: float = 0.3, alpha: float = 5.0, most: float = 0.2) -> None:
        proportion(ratio=ratio, most=most)
        if alpha <= 0:
            raise ConfigError(f"alpha is {alpha}; it must be above 0")
        self.ratio, self.alpha, self.most = ratio, alpha, most
        self.width = math.ceil(ratio * context.head_dim)
        super().__init__(
            context,
            columns={"partial": ((self.width,), context.dtype)},
            learned={"skew": ((context.head_dim, self.width), torch.float32)},
        )
        self._queries = torch.empty(0)

    def build(self, seq: int, first: int, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        self._queries = queries
        super().build(seq, first, keys, values, queries)
        self._queries = queries[:, :0]

    def learn(self, seq: int, keys: Tensor) -> None:
        queries = self._queries.unflatten(0, (self.context.kv_heads, -1)).flatten(1, 2).float()
        turn = principal(queries).float()  # [H, D, D], V of queries = U S V^T
        asked, held = ((rows @ turn).abs().mean(dim=1) for rows in (queries, keys.float()))
        kept = torch.topk(asked.nan_to_num() + held, self.width, dim=1).indices
        self.tables["skew"][seq] = turn.gather(2, kept[:, None].expand(-1, keys.shape[2], -1))

    def encode(self, seqs: Sequence[int], keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        return {"partial": (keys.float() @ self.of("skew", seqs)).to(keys.dtype)}

    def estimate(self, query: Tensor, tokens: int) -> Tensor:
        batch = query.shape[0]
        partial = self.tables["partial"][:batch, :, :tokens].float()
        return query.float() @ self.tables["skew"][:batch] @ partial.mT

    def select(self, query: Tensor, budget: int) -> Selection:
        tokens = self.ready(query)
        batch = query.shape[0]
        logits = self.estimate(query.unflatten(1, (self.context.kv_heads, -1)), tokens) * self.context.scale
        if not tokens:
            return self.best(logits.amax(dim=2), budget)
        logits = logits.masked_fill(~self.held(batch, tokens)[:, :, None], -torch.inf)
        top = logits.amax(dim=3, keepdim=True)
        behind = (logits - torch.where(top == -torch.inf, 0.0, top)).amax(dim=2)
        counting = self.context.ranks.gather((behind > -self.alpha).sum(dim=2), 1).float().mean(dim=1)
        known = self.known[:batch]
        wanted = torch.minimum(counting.ceil(), (known * self.most).ceil()).long()
        wanted = torch.where(known <= budget, budget, wanted)
        all_of_them = self.best(behind, budget)
        place = torch.arange(budget, device=query.device)
        rows = torch.where(place < wanted[:, None, None], all_of_them.rows, -1)
        return Selection(rows, (rows >= 0).sum(dim=2, dtype=torch.int32))
