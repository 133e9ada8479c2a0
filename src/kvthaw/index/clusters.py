"""Semantic clusters of keys (ClusterKV, sections III and IV)."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from kvthaw.errors import ConfigError
from kvthaw.index.mix import GOLDEN, SPREAD, mix
from kvthaw.index.units import Lane, UnitIndex, means
from kvthaw.kernels.kmeans import Distance, check_distance, kmeans
from kvthaw.kernels.unit_select import Policy
from kvthaw.types import LayerShape

Start = Literal["random", "spread"]
"""The keys that k-means begins with: drawn at random, as in the paper, or spread over the directions that keys have."""


def draw(positions: Tensor, count: int, *, seed: int, layer: int, heads: int) -> Tensor:
    """`count` of n positions for every head, as indices into positions [n], [H, count] int64, ascending: those whose hash of
    (seed, layer, head, position) is least. count <= n."""
    head = torch.arange(heads, device=positions.device)[:, None]
    x = mix(positions.long()[None] * GOLDEN + ((seed * 1_000_003 + layer) * 65_537 + head) * SPREAD)
    return torch.topk(x, count, dim=1, largest=False).indices.sort(dim=1).values


def spread(keys: Tensor, count: int) -> Tensor:
    """`count` of the keys [N, T, D], as indices [N, count] int64: the first key, then again and again the one whose largest
    cosine with those already chosen is least, of equal ones the first. count <= T; `count` passes over the keys, no host sync."""
    unit = torch.nn.functional.normalize(keys.float(), dim=2)
    chosen = torch.zeros((keys.shape[0], count), dtype=torch.int64, device=keys.device)
    nearest = torch.full(keys.shape[:2], -torch.inf, device=keys.device)
    for i in range(1, count):
        last = unit.gather(1, chosen[:, i - 1, None, None].expand(-1, 1, unit.shape[2]))
        nearest = torch.maximum(nearest, (unit @ last.transpose(1, 2))[..., 0])
        chosen[:, i] = nearest.argmin(dim=1)
    return chosen


class ClusterIndex(UnitIndex):
    """k-means clusters of the prompt's keys, and of every `batch` tokens that leave the window after it, among themselves.

    A prompt of L tokens gets L / tokens_per_cluster clusters (or exactly `clusters`), a batch gets clusters_per_batch. Until
    a batch is full, its tokens are as many temporary clusters in text order, each with the mean of its keys. Clusters are
    ranked by q.mu and taken whole, the last one cut: its earliest tokens stay. start="spread" gives keys unlike all others, as
    those of a needle are, clusters of their own, whose mean is near them. On a GPU a prompt is clustered on a stream of
    its own, beside the layers that follow; the first select() waits for it on the device.
    """

    mapped = True

    def __init__(
        self,
        shape: LayerShape,
        *,
        tokens_per_cluster: int = 80,
        clusters: int | None = None,
        batch: int = 320,
        clusters_per_batch: int = 4,
        distance: Distance = "cosine",
        start: Start = "random",
        iterations: int = 20,
        policy: Policy = "max",
    ) -> None:
        check_distance(distance)
        if start not in get_args(Start):
            raise ConfigError(f"start is {start!r}; it must be one of {', '.join(get_args(Start))}")
        given = {
            "tokens_per_cluster": tokens_per_cluster,
            "batch": batch,
            "clusters_per_batch": clusters_per_batch,
            "iterations": iterations,
        }
        for name, value in (given | ({} if clusters is None else {"clusters": clusters})).items():
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if batch % clusters_per_batch:
            raise ConfigError(f"batch is {batch}; it must be a multiple of clusters_per_batch, {clusters_per_batch}")
        self.tokens_per_cluster, self.clusters, self.per_batch = tokens_per_cluster, clusters, clusters_per_batch
        self.distance: Distance = distance
        self.start: Start = start
        self.iterations = iterations
        super().__init__(shape, size=batch // clusters_per_batch, batch=batch, width=shape.head_dim, policy=policy)

    def build(self, lane: int, first: int, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        """See Index."""
        self.truncate(lane, 0)
        self.first = first
        tokens = keys.shape[1]
        if not tokens:
            return
        count = min(tokens, self.clusters or max(1, tokens // self.tokens_per_cluster))
        self.reserve(lane + 1)
        self.reserve(0, count + 1, tokens)
        self.beside(lambda: self._cluster(lane, 0, 0, keys[:, None], count), keys)
        self._set(lane, Lane(tokens, count, 0, [(0, 0), (tokens, count)]))

    def most_units(self, tokens: int) -> int:
        """See UnitIndex."""
        return super().most_units(tokens) + max(self.clusters or 0, tokens // self.tokens_per_cluster)

    def digest(self, keys: Tensor) -> Tensor:
        """See UnitIndex: the mean of every `size` keys."""
        return means(keys, self.size)

    def close(self, lane: int, begin: int, before: int, keys: Tensor) -> None:
        """See UnitIndex: cluster each batch among itself."""
        self._cluster(lane, begin, before, keys, self.per_batch)

    def _cluster(self, lane: int, begin: int, before: int, keys: Tensor, count: int) -> None:
        """Cluster batches keys [H, n, T, D], each into `count` units, in their places of the tables."""
        heads, batches, tokens, dim = keys.shape
        device = keys.device
        starts = torch.arange(batches, device=device)[None, :, None] * tokens  # of each batch, from `begin`
        together = keys.flatten(0, 1)
        if self.start == "spread":
            first = spread(together, count)
        else:
            positions = self.first + begin + torch.arange(batches * tokens, device=device).view(batches, tokens)
            drawn = [draw(own, count, seed=self.shape.seed, layer=self.shape.layer, heads=heads) for own in positions.unbind()]
            first = torch.stack(drawn, dim=1).flatten(0, 1)
        means, order, stops = kmeans(together, first, distance=self.distance, iterations=self.iterations)
        units, end = batches * count, begin + batches * tokens
        self.digests[lane, :, before : before + units] = means.view(heads, units, dim).to(self.digests.dtype)
        stops = stops.view(heads, batches, -1)[:, :, 1:] + starts + begin
        self.stops[lane, :, before] = begin
        self.stops[lane, :, before + 1 : before + units + 1] = stops.flatten(1).int()
        assert self.order is not None
        where = order.view(heads, batches, tokens) + starts + (self.first + begin)
        self.order[lane, :, begin:end] = where.flatten(1).int()
