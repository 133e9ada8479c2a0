"""Semantic clusters of keys (ClusterKV, sections III and IV)."""

from __future__ import annotations

from collections.abc import Generator, Hashable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from kvthaw.cache.index_api import IndexContext, Selection
from kvthaw.errors import ConfigError, at_least, one_of
from kvthaw.index.batches import BatchedIndex, BatchGroup, Formed
from kvthaw.index.draws import drawn
from kvthaw.index.joined import joined_or_all
from kvthaw.kernels.cover import cover, directions
from kvthaw.kernels.kmeans import Distance, kmeans_in_pieces
from kvthaw.kernels.unit_select import Policy

Choice = Literal[Policy, "each"]
"""How the query heads of a KV head agree, or that each of them chooses for itself."""
Start = Literal["covering", "random"]
"""The initial centres of k-means: half of them drawn at random and half the keys covered worst, or all drawn, as in the paper."""
_ROUNDS, _MOST = 4, 256  # least number of rounds; most keys that a round adds
_AMONG = 4  # how many times more keys it chooses among


def covering(keys: Tensor, drawn: Tensor, count: int) -> Generator[None, None, Tensor]:
    """Choose `count` of the keys [N, T, D], one round at a time: the drawn ones and the keys that these cover worst.

    There are at least four rounds, which add equally many keys. A round ranks the keys by their largest cosine with any key
    chosen so far, the smallest first. It adds the first keys of the ranking that are unlike all keys before them
    (`unlike`).

    drawn: [N, C], 1 <= C <= count <= T.

    Returns indices [N, count] int64, ascending, without repeats. No host sync.
    """
    chosen = new = drawn
    covered = torch.full(keys.shape[:2], -torch.inf, device=keys.device)
    rounds = rounds_of(count - drawn.shape[1])
    while lacking := count - chosen.shape[1]:
        cover(covered, keys, new)
        covered.scatter_(1, new, torch.inf)
        more = -(-lacking // rounds)
        new = unlike(keys, covered, more, among=min(_AMONG * more, keys.shape[1] - chosen.shape[1]))
        chosen = torch.cat((chosen, new), dim=1)
        rounds -= 1
        yield
    return chosen.sort(dim=1).values


def rounds_of(count: int) -> int:
    """Return the number of rounds in which `count` keys are added."""
    return max(_ROUNDS, -(-count // _MOST))


def unlike(keys: Tensor, covered: Tensor, count: int, *, among: int) -> Tensor:
    """Choose `count` of the `among` keys [N, T, D] that are covered least. Returns indices [N, count]; the first of equal
    keys.

    A key is skipped if it is nearer to a key before it in the ranking than the ranking's last key is to its cover. That
    earlier key may come to cover it. If too few keys are left, the first skipped ones are taken.

    covered: [N, T] float32, cosines.
    """
    # positive floats rank as their bits do; with the position behind, no two are equal
    ranking = ((covered + 2.0).view(torch.int32).long() << 31) + torch.arange(keys.shape[1], device=keys.device)
    rank, worst = torch.topk(ranking, among, dim=1, largest=False, sorted=False)
    unit = directions(keys, worst)
    near = unit @ unit.transpose(1, 2) > covered.gather(1, worst).amax(dim=1)[:, None, None]
    like = (near & (rank[:, None] < rank[:, :, None])).any(dim=2)
    kept = torch.topk(rank + (like.long() << 62), count, dim=1, largest=False, sorted=False).indices
    return worst.gather(1, kept)


def first_keys(keys: Tensor, positions: Tensor, count: int, *, start: Start, streams: Tensor) -> Generator[None, None, Tensor]:
    """The keys that k-means begins with, in pieces: keys [..., T, D] at positions [..., T] of heads [..., 1], which broadcast; see
    `drawn`. Returns [N, count] int64, ascending, N all of the former dimensions."""
    few = drawn(positions, count - count // 2 if start == "covering" else count, streams)
    few = few.expand(*keys.shape[:-2], -1).flatten(0, -2)
    return (yield from covering(keys.flatten(0, -3), few, count)) if few.shape[1] < count else few


class ClusterIndex(BatchedIndex, tested=True):
    """k-means clusters of the prompt's keys, and of every `batch` later tokens that leave the window.

    A prompt of L tokens gets L / tokens_per_cluster clusters (or exactly `clusters`), a batch gets clusters_per_batch.
    Until a batch is full, its tokens form clusters_per_batch temporary clusters in text order, each with the mean of its
    keys. Clusters are ranked by q.mu and taken whole; of the last one only the earliest tokens that fit.

    start="covering" gives a key unlike all others, such as a needle's, a cluster of its own with a mean near it. A random
    start may leave it in another cluster. On a GPU a long prompt is clustered on the cache's side stream during the
    following layers. The first select() waits for it on the device. Short prompts of all layers are clustered at once.
    """

    def __init__(
        self,
        context: IndexContext,
        *,
        tokens_per_cluster: int = 32,
        clusters: int | None = None,
        batch: int = 320,
        clusters_per_batch: int = 10,
        distance: Distance = "cosine",
        start: Start = "covering",
        iterations: int = 8,
        policy: Choice = "max",
    ) -> None:
        one_of(get_args(Distance), distance=distance)
        one_of(get_args(Start), start=start)
        at_least(1, tokens_per_cluster=tokens_per_cluster, batch=batch, clusters_per_batch=clusters_per_batch)
        at_least(1, iterations=iterations, clusters=clusters)
        if batch % clusters_per_batch:
            raise ConfigError(f"batch is {batch}; it must be a multiple of clusters_per_batch, {clusters_per_batch}")
        self.tokens_per_cluster, self.clusters = tokens_per_cluster, clusters
        self.distance: Distance = distance
        self.start: Start = start
        self.iterations, self.each = iterations, policy == "each"
        how: dict[str, Any] = {"width": context.head_dim, "policy": "max" if self.each else policy}  # alone, a head agrees
        super().__init__(context, batch=batch, per_batch=clusters_per_batch, **how)

    @property
    def settings(self) -> Hashable:
        return self.batch, self.per_batch, self.distance, self.start, self.iterations

    def build(self, seq: int, first: int, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        tokens = keys.shape[1]
        count = min(tokens, self.clusters or max(1, tokens // self.tokens_per_cluster))
        self.build_prompt(seq, first, keys, count)

    def most_units(self, tokens: int) -> int:
        return super().most_units(tokens) + max(self.clusters or 0, tokens // self.tokens_per_cluster)

    def form(self, group: BatchGroup, count: int) -> Generator[None, None, Formed]:
        chosen = yield from first_keys(group.keys, group.positions, count, start=self.start, streams=group.streams)
        yield
        return (
            yield from kmeans_in_pieces(group.keys.flatten(0, 2), chosen, distance=self.distance, iterations=self.iterations)
        )

    def pieces(self, count: int) -> int:
        return self.iterations + (2 if self.start == "random" else 2 + rounds_of(count // 2))

    def select(self, query: Tensor, budget: int) -> Selection:
        """Select rows; see Index. With "each", every query head takes the best clusters up to budget / G rows, and no others."""
        if not self.each:
            return super().select(query, budget)
        batch, (*heads,) = query.shape[0], query.unflatten(1, (self.context.kv_heads, -1)).unbind(2)
        share = max(1, budget // len(heads))
        rows = torch.stack([super(ClusterIndex, self).select(one, share).rows for one in heads], dim=2)
        tokens = self.stops[:batch, 0].gather(1, self.counts[:batch, None].long())[:, 0]
        return Selection(*joined_or_all(rows, budget, self.first, tokens))
