"""An index that computes every score. Keys stay on the device; graph-safe within a capacity."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvthaw.cache.index_api import IndexContext
from kvthaw.index.tokens import Policy, TokenIndex


class ExactIndex(TokenIndex, tested=True):
    """Exact top-k by attention weight.

    With G query heads on a KV head the heads' choices become one by `policy`: the largest or the mean of their softmax weights over
    the indexed keys, or the score of their mean query. keys [B, H, capacity, D] doubles when it is full.
    """

    def __init__(self, context: IndexContext, *, policy: Policy = "max") -> None:
        super().__init__(context, columns={"keys": ((context.head_dim,), context.dtype)}, policy=policy)

    def encode(self, seqs: Sequence[int], keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        return {"keys": keys}

    def estimate(self, query: Tensor, tokens: int) -> Tensor:
        return query @ self.tables["keys"][: query.shape[0], :, :tokens].transpose(2, 3)
