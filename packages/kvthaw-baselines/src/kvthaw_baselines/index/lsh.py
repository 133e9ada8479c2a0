"""Sampling by locality-sensitive hashing: MagicPIG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvthaw.cache.index_api import IndexContext, Selection
from kvthaw.counter_rng import GOLDEN, SPREAD, mix
from kvthaw.errors import at_least, within
from kvthaw.index.draws import stream
from kvthaw.index.tokens import TokenIndex
from kvthaw_baselines.index.planes import Planes
from kvthaw_baselines.kernels.code_hits import code_hits

_VECTORS = 2048  # vectors of a head coded at once


def drawn_probability(cosine: Tensor, bits: int, tables: int) -> Tensor:
    """That two vectors of a cosine meet in two tables at least: 1 - (1 - p^K)^L - L p^K (1 - p^K)^(L - 1), p = 1 - angle / pi.
    float64."""
    meet = (1 - torch.arccos(cosine.double().clamp(-1, 1)) / torch.pi) ** bits
    return 1 - (1 - meet) ** tables - tables * meet * (1 - meet) ** (tables - 1)


class HashIndex(TokenIndex, tested=True):
    """Draw the tokens whose code equals the query's in at least two of L tables, each weighted by the inverse of its
    probability.

    A code is K signs of products with random directions, of the key less the mean of the prompt's keys. A token's log
    weight is -log w, w the chance `drawn_probability` that this query head draws it; -inf for a head that did not. If a
    group's query heads draw more tokens than the budget, they are thinned at random. Every token has the same probability
    to stay, which enters the weight too. If the budget holds the whole sequence, all tokens are selected with weight 1.

    codes [B, H, capacity, L] int16 and keys [B, H, capacity, D], for the angles; mean [B, H, D] float32.
    """

    traits = replace(TokenIndex.traits, grows=False)

    def __init__(self, context: IndexContext, *, bits: int = 10, tables: int = 150) -> None:
        within(1, 15, bits=bits)
        at_least(2, tables=tables)
        self.bits, self.L = bits, tables
        dim = context.head_dim
        super().__init__(
            context,
            columns={"codes": ((tables,), torch.int16), "keys": ((dim,), context.dtype)},
            learned={"mean": ((dim,), torch.float32)},
        )
        self.planes = Planes(context, tables=tables, bits=bits)

    def learn(self, seq: int, keys: Tensor) -> None:
        self.tables["mean"][seq] = keys.float().contiguous().mean(dim=1)  # the same sum however the keys lie in memory

    def encode(self, seqs: Sequence[int], keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        return {"codes": self.code(keys - self.of("mean", seqs)[:, :, None]), "keys": keys}

    def code(self, vectors: Tensor) -> Tensor:
        """Vectors [..., H, n, D] -> codes [..., H, n, L] int16, in blocks."""
        return torch.cat([self.planes.code(some).to(torch.int16) for some in vectors.split(_VECTORS, dim=-2)], dim=-2)

    def select(self, query: Tensor, budget: int) -> Selection:
        tokens = self.ready(query)
        batch, heads = query.shape[0], self.context.kv_heads
        grouped = query.unflatten(1, (heads, -1))
        asked = self.code(grouped)  # [B, H, G, L]
        hits = code_hits(self.tables["codes"][:batch, :, :tokens], asked, self.known[:batch])  # [B, H, G, T]
        held, whole = self.held(batch, tokens), (self.known[:batch] <= budget)[:, None, None]
        drawn = (hits >= 2) & held[:, :, None]
        some = (drawn.any(dim=2) | whole) & held
        total = some.sum(dim=2, keepdim=True)
        place = torch.arange(tokens, device=query.device)
        order = mix(self.salt(asked)[..., None] + (self.first + place) * GOLDEN) >> 2  # a random order, another for every query
        top = torch.topk(torch.where(some, order, -(1 << 63)), min(budget, tokens), dim=2).indices
        taken = some.gather(2, top)
        width = top.shape[2]
        rows = torch.full((batch, heads, budget), -1, dtype=torch.int32, device=query.device)
        rows[:, :, :width] = torch.where(taken, top + self.first, -1).int()
        keys = self.tables["keys"][:batch].gather(2, top[..., None].expand(-1, -1, -1, query.shape[2])).float()
        centred = keys - self.tables["mean"][:batch, :, None]
        cosine = torch.nn.functional.normalize(grouped.float(), dim=3) @ torch.nn.functional.normalize(
            centred, dim=3
        ).transpose(2, 3)
        stays = (budget / total.clamp(min=1)).clamp(max=1)[:, :, None]
        weight = -torch.log(drawn_probability(cosine, self.bits, self.L).clamp(min=1e-30) * stays).float()
        own = drawn.gather(3, top[:, :, None].expand(-1, -1, grouped.shape[2], -1))
        weight = torch.where(whole[..., None], 0.0, weight.masked_fill(~own, -torch.inf))
        log_weight = torch.zeros((batch, query.shape[1], budget), dtype=torch.float32, device=query.device)
        log_weight[:, :, :width] = torch.where(taken[:, :, None], weight, 0.0).flatten(1, 2)
        return Selection(rows, taken.sum(dim=2, dtype=torch.int32), log_weight=log_weight)

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), *self.planes.tensors()]

    def salt(self, asked: Tensor) -> Tensor:
        """A number for the queries of a group, [B, H] int64, of their codes: asked [B, H, G, L]."""
        context = self.context
        factors = mix(torch.arange(1, asked.shape[2] * self.L + 1, device=asked.device) * GOLDEN)
        head = torch.arange(context.kv_heads, device=asked.device)
        base = stream(context) + head
        return mix((asked.flatten(2).long() * factors).sum(dim=2) + base * SPREAD)
