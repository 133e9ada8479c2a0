"""Something on the device for every key, and the tokens of the best scores: what exact top-k, PQCache, MagicPIG and OmniKV have
in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from kvthaw.cache.index_api import Index, IndexContext, Selection, Traits
from kvthaw.errors import one_of
from kvthaw.index.tables import Column, Full, TablesOnDevice, Target

Policy = Literal["max", "mean", "mean_query"]
"""How the query heads of a group agree on tokens: the largest or the mean of their softmax weights over the indexed keys, or the
score of their mean query."""

Columns = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def log_shares(logits: Tensor) -> Tensor:
    """Logs of softmax weights over the last dimension; all -inf, never NaN, where all logits are."""
    total = torch.logsumexp(logits, dim=-1, keepdim=True)
    return logits - torch.where(total == -torch.inf, 0.0, total)


class TokenIndex(TablesOnDevice, Index):
    """Tables with an entry for every token, and selection by a score per token.

    columns: tables per token, name -> (shape, dtype); each table is [B, H, capacity, *shape].
    learned: tables per sequence, [B, H, *shape], which `learn` writes.

    All `tables` are on the device, with a capacity that doubles, and are written in place.

    known: [B] int64, the numbers of tokens.
    """

    traits = Traits(graph_safe=True, reversible=True)
    known = Column()

    def __init__(
        self, context: IndexContext, *, columns: Columns, learned: Columns | None = None, policy: Policy = "max"
    ) -> None:
        one_of(get_args(Policy), policy=policy)
        super().__init__(context)
        self.policy, self.scale = policy, context.scale
        for name, (size, dtype) in columns.items():
            self.tables.add(name, (context.kv_heads, "tokens", *size), dtype)
        for name, (size, dtype) in (learned or {}).items():
            self.tables.add(name, (context.kv_heads, *size), dtype)
        self.tables.add("known", (), torch.int64)
        self.counts = self.tables.host(int)  # the same on the host

    # What a method adds

    def learn(self, seq: int, keys: Tensor) -> None:
        """Write the `learned` tables of a sequence, from its first keys [H, T, D], T > 0."""

    def encode(self, seqs: Sequence[int], keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        """What is kept of tokens, name -> [R, H, n, ...]. keys, values [R, H, n, D], of R sequences."""
        raise NotImplementedError

    def estimate(self, query: Tensor, tokens: int) -> Tensor:
        """Scores q.k, unscaled, of the first `tokens` places: query [B, H, P, D] -> [B, H, P, tokens]. Of places that hold no
        token they may be anything."""
        raise NotImplementedError

    # Index

    def make_room(self, seqs: int, tokens: int) -> None:
        have = self.tables.room["tokens"]
        self.tables.reserve(seqs, tokens=tokens if tokens <= have else max(tokens, 2 * have, 64))

    def lengths(self, seq: int) -> dict[str, int]:
        return {"tokens": self.counts[seq]}

    def build(self, seq: int, first: int, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        self.clear(seq, first)
        if keys.shape[1]:
            self.learn(seq, keys)
        self.append([seq], keys[None], values[None], None)

    def append(self, seqs: Sequence[int], keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        n = keys.shape[2]
        self.make_room(max(seqs) + 1, 0)
        self.make_room(0, max(self.counts[seq] for seq in seqs) + n)
        places = self._places(seqs, n)
        for name, kept in self.encode(seqs, keys, values).items():
            self.tables[name][places] = kept[0] if len(seqs) == 1 else kept
        for seq in seqs:
            self.counts[seq] += n
        self.sync_counts()

    def select(self, query: Tensor, budget: int) -> Selection:
        tokens = self.ready(query)
        grouped = query.unflatten(1, (self.context.kv_heads, -1))
        if self.policy == "mean_query":
            grouped = grouped.float().mean(dim=2, keepdim=True).to(query.dtype)
        weights = self.weigh(self.estimate(grouped, tokens))
        merged = weights.amax(dim=2) if self.policy == "max" else torch.logsumexp(weights, dim=2)
        return self.best(merged, budget)

    def truncate(self, seq: int, length: int) -> None:
        if seq < len(self.counts):
            self.counts[seq] = min(self.counts[seq], max(0, length - self.first))
            self.sync_counts()

    # Inside

    def ready(self, query: Tensor) -> int:
        """Room for the sequences of a query [B, Hq, D]. Returns how many places select() looks at."""
        batch = query.shape[0]
        self.make_room(batch, 0)
        return self.context.looked_at(self.counts[:batch], self.tables.room["tokens"])

    def held(self, seqs: int, tokens: int) -> Tensor:
        """Which of the first places hold a token, [B, 1, tokens] bool."""
        return torch.arange(tokens, device=self.context.device) < self.known[:seqs, None, None]

    def weigh(self, scores: Tensor) -> Tensor:
        """Return the logs of the softmax weights over the indexed keys, so that weights too small for float32 still have a
        rank.

        scores: [B, H, P, T] of q.k. The result has the same shape, with -inf for missing tokens.
        """
        held = self.held(scores.shape[0], scores.shape[3])[:, :, None]
        return log_shares((scores.float() * self.scale).masked_fill(~held, -torch.inf))

    def best(self, merged: Tensor, budget: int) -> Selection:
        """The `budget` tokens of the largest merged [B, H, T], of equal ones the earlier; -inf: none."""
        batch, heads, tokens = merged.shape
        rows = torch.full((batch, heads, budget), -1, dtype=torch.int32, device=merged.device)
        bits = (merged.float() + 0.0).view(torch.int32).long()
        ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # integers in the order of the floats
        keys = (ordered << 32) - torch.arange(tokens, device=merged.device)
        top = torch.topk(keys, min(budget, tokens), dim=2).indices
        found = merged.gather(2, top) > -torch.inf
        rows[:, :, : found.shape[2]] = torch.where(found, top + self.first, -1).int()
        return Selection(rows, found.sum(dim=2, dtype=torch.int32))

    def of(self, name: str, seqs: Sequence[int]) -> Tensor:
        """Return the rows of a `learned` table for some sequences, [R, H, ...]."""
        learned = self.tables[name]
        if len(seqs) == 1:
            return learned[seqs[0] : seqs[0] + 1]
        return learned.index_select(0, self._deferred.numbers([(seq,) for seq in seqs], learned.device)[:, 0])

    def _places(self, seqs: Sequence[int], n: int) -> tuple[Any, ...]:
        """Indices of the tables: the next n places of some sequences."""
        if len(seqs) == 1:
            start = self.counts[seqs[0]]
            return seqs[0], slice(None), slice(start, start + n)
        heads, device = self.context.kv_heads, self.context.device
        full = tuple(Full(seq, self.counts[seq], 0) for seq in seqs)
        return self._deferred.once((full, n, heads, device), lambda: Target.of(full, heads, device).places(n))

    def sync_counts(self) -> None:
        """Copy the counts to the device."""
        self.known.copy_(self._deferred.numbers([tuple(self.counts)], self.known.device)[0])
