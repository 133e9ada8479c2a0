"""Hashed keys, softly hashed queries: SOCKET."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvthaw.cache.index_api import IndexContext
from kvthaw.errors import at_least, within
from kvthaw.index.tokens import Policy, TokenIndex
from kvthaw_baselines.index.planes import Planes

_NATS = 87.0
"""How far two logits may lie apart until the lesser one's chance is less than any float32 that is exact."""


class SoftHashIndex(TokenIndex, tested=True):
    """Score a token by the probability that the query meets it, summed over L tables, times the length of its value if
    `values`.

    Table l has K random directions w_li. A key is in the bucket of its signs. A query is in every bucket c of {-1, 1}^K
    with probability p_l(c) = softmax_c(sum_i tanh(q.w_li) c_i / (tau sqrt(D))). D is head_dim, as in the authors' code.
    score = |v| sum_l p_l(bucket of k), without |v| unless `values`. The query heads of a group agree by their scores'
    shares of the sum over the indexed tokens; "mean_query" uses the score of the mean query.

    buckets [B, H, capacity, L] uint8 or, for more than 8 bits, int16; lengths [B, H, capacity] float32, if they count.
    """

    def __init__(
        self,
        context: IndexContext,
        *,
        bits: int = 10,
        tables: int = 60,
        tau: float = 0.3,
        values: bool = True,
        policy: Policy = "max",
    ) -> None:
        within(1, 12, bits=bits)
        at_least(1, tables=tables)
        root = math.sqrt(context.head_dim)
        at_least(math.ceil(1e3 * 2 * bits / (_NATS * root)) / 1e3, tau=tau)
        self.bits, self.count, self.tau, self.softness = bits, tables, tau, tau * root
        kind = torch.uint8 if bits <= 8 else torch.int16
        columns: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"buckets": ((tables,), kind)}
        if values:
            columns["lengths"] = (), torch.float32
        super().__init__(context, columns=columns, policy=policy)
        self.planes = Planes(context, tables=tables, bits=bits)
        powers = 1 << torch.arange(bits, device=context.device)
        self.corners = ((torch.arange(1 << bits, device=context.device)[:, None] & powers) > 0).float() * 2 - 1  # [2^K, K]

    def encode(self, seqs: Sequence[int], keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        kind = self.tables["buckets"].dtype
        coded = {"buckets": self.planes.code(keys).to(kind)}
        return coded | ({"lengths": values.float().norm(dim=3)} if "lengths" in self.tables else {})

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), *self.planes.tensors(), self.corners]

    def chances(self, query: Tensor) -> Tensor:
        """p_l(c) for query [B, H, P, D]: [B, H, P, L, 2^K] float32; bit i of a bucket is the sign of direction i."""
        turned = torch.tanh(query.float() @ self.planes.directions).unflatten(3, (self.count, self.bits)) / self.softness
        return torch.softmax(turned @ self.corners.T, dim=4)

    def estimate(self, query: Tensor, tokens: int) -> Tensor:
        """See TokenIndex: log of the score over the scale, so that a token's softmax weight is its share of all scores."""
        batch, heads, asked, _ = query.shape
        chances, buckets = self.chances(query), self.tables["buckets"][:batch, :, :tokens]
        total = torch.zeros((batch, heads, asked, tokens), dtype=torch.float32, device=query.device)
        for table in range(self.count):
            where = buckets[:, :, None, :, table].long().expand(-1, -1, asked, -1)
            total += chances[:, :, :, table].gather(3, where)
        if "lengths" in self.tables:
            total = total * self.tables["lengths"][:batch, :, None, :tokens]
        least = torch.finfo(torch.float32).tiny  # a value of 0 ranks last, but it is a token
        return total.clamp(min=least).log() / self.scale
