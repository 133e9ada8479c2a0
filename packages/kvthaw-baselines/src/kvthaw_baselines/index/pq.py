"""Product quantisation of keys: PQCache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvthaw.cache.index_api import IndexContext
from kvthaw.errors import ConfigError, at_least, within
from kvthaw.index.draws import drawn, stream
from kvthaw.index.tokens import Policy, TokenIndex
from kvthaw.kernels.kmeans import kmeans_in_pieces, whole

_BLOCK = 4096
"""Points that are compared with centroids at once."""


def assign(points: Tensor, centroids: Tensor) -> Tensor:
    """Return the nearest centroid of each point: [H, P, n] uint8.

    points: [H, P, n, D / P] of P parts.
    centroids: [H, P, C, D / P], at most 256.
    """
    half = centroids.square().sum(dim=-1)[:, :, None] / 2
    parts = [
        (points[:, :, at : at + _BLOCK] @ centroids.transpose(2, 3) - half).argmax(dim=-1).to(torch.uint8)
        for at in range(0, points.shape[2], _BLOCK)
    ]
    return torch.cat(parts, dim=2) if parts else points.new_zeros(points.shape[:3], dtype=torch.uint8)


class ProductIndex(TokenIndex, tested=True):
    """Approximate a key by `parts` centroids, one for each part of its dimensions. Their products with the query estimate q.k.

    k-means learns the centroids on the prompt, once for each KV head and part. Later tokens get the nearest centroids. ids
    [B, H, capacity, parts] uint8; centroids [B, H, parts, C, D / parts] float32. If there are fewer keys than centroids,
    the keys are the centroids.
    """

    traits = replace(TokenIndex.traits, grows=False)

    def __init__(
        self, context: IndexContext, *, parts: int = 2, centroids: int = 64, iterations: int = 20, policy: Policy = "max"
    ) -> None:
        if parts < 1 or context.head_dim % parts:
            raise ConfigError(f"parts is {parts}; it must be at least 1 and divide head_dim, {context.head_dim}")
        within(1, 256, centroids=centroids)
        at_least(1, iterations=iterations)
        self.parts, self.centroids, self.iterations = parts, centroids, iterations
        table = (parts, centroids, context.head_dim // parts)
        super().__init__(
            context,
            columns={"ids": ((parts,), torch.uint8)},
            learned={"centroids": (table, torch.float32)},
            policy=policy,
        )

    def learn(self, seq: int, keys: Tensor) -> None:
        points, heads, tokens = self.split(keys), keys.shape[0], keys.shape[1]
        context, count = self.context, min(self.centroids, tokens)
        positions = torch.arange(self.first, self.first + tokens, device=keys.device)
        streams = stream(context, self.parts) + torch.arange(heads * self.parts, device=keys.device)
        starts = drawn(positions, count, streams[:, None])
        means = whole(kmeans_in_pieces(points.flatten(0, 1), starts, distance="l2", iterations=self.iterations))[0]
        table = self.tables["centroids"][seq]
        table[:, :, :count] = means.view(heads, self.parts, count, -1)
        table[:, :, count:] = table[:, :, :1]  # of equal ones the first is the nearest

    def encode(self, seqs: Sequence[int], keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        found = assign(self.split(keys.flatten(0, 1)), self.of("centroids", seqs).flatten(0, 1))
        return {"ids": found.transpose(1, 2).unflatten(0, keys.shape[:2])}

    def estimate(self, query: Tensor, tokens: int) -> Tensor:
        batch, ids = query.shape[0], self.tables["ids"][: query.shape[0], :, None, :tokens]
        asked = query.float().unflatten(3, (self.parts, -1))
        products: Tensor = torch.einsum("bhgps,bhpcs->bhgpc", asked, self.tables["centroids"][:batch])
        where = ids.expand(-1, -1, query.shape[2], -1, -1).long()
        scores = products.new_zeros(where.shape[:4])
        for part in range(self.parts):
            scores += products[:, :, :, part].gather(3, where[..., part])
        return scores

    def split(self, keys: Tensor) -> Tensor:
        """keys [H, n, D] -> [H, parts, n, D / parts] float32."""
        split: Tensor = keys.float().unflatten(2, (self.parts, -1))
        return split.transpose(1, 2).contiguous()
