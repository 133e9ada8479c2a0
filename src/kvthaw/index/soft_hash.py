"""Hashed keys, softly hashed queries: SOCKET."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvthaw.cache.index_api import IndexContext
from kvthaw.errors import at_least, within
from kvthaw.index.planes import Planes
from kvthaw.index.tokens import Policy, TokenIndex


class SoftHashIndex(TokenIndex):
    """A token's score is the chance that the query meets it, summed over L tables, times the length of its value.

    Table l has K random directions w_li. A key stands in the bucket of its signs; a query is in every bucket c of {-1, 1}^K with
    the chance p_l(c) = softmax_c(sum_i tanh(q.w_li) c_i / tau). score = |v| sum_l p_l(bucket of k). The query heads of a group
    agree by their scores' shares of the sum over the indexed tokens; mean_query: by the score of the mean query.

    buckets [B, H, capacity, L] uint8 or, for more than 8 bits, int16; lengths [B, H, capacity] float32.
    """

    def __init__(
        self, context: IndexContext, *, bits: int = 10, tables: int = 60, tau: float = 0.3, policy: Policy = "max"
    ) -> None:
        within(1, 12, bits=bits)
        at_least(1, tables=tables)
        at_least(0.2, tau=tau)  # below it a chance may be less than any float32
        self.bits, self.count, self.tau = bits, tables, tau
        kind = torch.uint8 if bits <= 8 else torch.int16
        super().__init__(context, columns={"buckets": ((tables,), kind), "lengths": ((), torch.float32)}, policy=policy)
        self.planes = Planes(context, tables=tables, bits=bits)
        powers = 1 << torch.arange(bits, device=context.device)
        self.corners = ((torch.arange(1 << bits, device=context.device)[:, None] & powers) > 0).float() * 2 - 1  # [2^K, K]

    def encode(self, seqs: Sequence[int], keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        kind = self.tables["buckets"].dtype
        return {"buckets": self.planes.code(keys).to(kind), "lengths": values.float().norm(dim=3)}

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), *self.planes.tensors(), self.corners]

    def chances(self, query: Tensor) -> Tensor:
        """p_l(c) for query [B, H, P, D]: [B, H, P, L, 2^K] float32; bit i of a bucket is the sign of direction i."""
        turned = torch.tanh(query.float() @ self.planes.directions).unflatten(3, (self.count, self.bits)) / self.tau
        return torch.softmax(turned @ self.corners.T, dim=4)

    def estimate(self, query: Tensor, tokens: int) -> Tensor:
        """See TokenIndex: log of the score over the scale, so that a token's softmax weight is its share of all scores."""
        batch, heads, asked, _ = query.shape
        chances, buckets = self.chances(query), self.tables["buckets"][:batch, :, :tokens]
        total = torch.zeros((batch, heads, asked, tokens), dtype=torch.float32, device=query.device)
        for table in range(self.count):
            where = buckets[:, :, None, :, table].long().expand(-1, -1, asked, -1)
            total += chances[:, :, :, table].gather(3, where)
        least = torch.finfo(torch.float32).tiny  # a value of 0 ranks last, but it is a token
        return (total * self.tables["lengths"][:batch, :, None, :tokens]).clamp(min=least).log() / self.scale
