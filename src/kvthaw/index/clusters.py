"""Semantic clusters of keys (ClusterKV, sections III and IV)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from kvthaw.cache.index_api import IndexContext
from kvthaw.counter_rng import GOLDEN, SPREAD, mix
from kvthaw.errors import ConfigError, at_least, one_of
from kvthaw.index.target import Full, Target
from kvthaw.index.units import UnitIndex
from kvthaw.kernels.cover import cover, directions
from kvthaw.kernels.kmeans import Distance, kmeans
from kvthaw.kernels.unit_select import Policy

Start = Literal["covering", "random"]
"""The keys that k-means begins with: half drawn at random and half those that the others cover worst, or all drawn, as in the
paper."""
AT_ONCE = 1 << 28
"""Bytes of generated tokens' keys that are clustered at once, of one layer at least: many sequences' need much memory."""
_ROUNDS, _MOST, _AMONG = 4, 256, 4  # rounds at least; what a round adds at most, and among how many times as many


def stream(context: IndexContext, each: int = 1) -> int:
    """The number of a layer's first head in this process among all heads that draw. each: how many numbers a head has."""
    return ((context.seed * 1_000_003 + context.layer) * 65_537 & ((1 << 63) - 1)) + context.heads.start * each


def drawn(positions: Tensor, count: int, streams: Tensor) -> Tensor:
    """`count` of n positions for every head, as indices into positions [..., n], [..., count] int64, ascending: those whose hash of
    the head's number, streams [..., 1] int64, and the position is least. count <= n."""
    x = mix(positions.long() * GOLDEN + streams * SPREAD)
    return torch.topk(x, count, dim=-1, largest=False).indices.sort(dim=-1).values


def covering(keys: Tensor, drawn: Tensor, count: int) -> Tensor:
    """The keys drawn and those that the others cover worst: `count` of the keys [N, T, D], as indices [N, count] int64, ascending,
    none twice. drawn [N, C], C at least 1 and at most count; count <= T. No host sync.

    In four rounds or more, each adding as many keys as the others: keys are ranked by their largest cosine with any key chosen so
    far, the smallest first, and those are added that are like none before them in the ranking (`unlike`).
    """
    chosen = new = drawn
    covered = torch.full(keys.shape[:2], -torch.inf, device=keys.device)
    rounds = max(_ROUNDS, -(-(count - drawn.shape[1]) // _MOST))
    while lacking := count - chosen.shape[1]:
        cover(covered, keys, new)
        covered.scatter_(1, new, torch.inf)
        more = -(-lacking // rounds)
        new = unlike(keys, covered, more, among=min(_AMONG * more, keys.shape[1] - chosen.shape[1]))
        chosen = torch.cat((chosen, new), dim=1)
        rounds -= 1
    return chosen.sort(dim=1).values


def unlike(keys: Tensor, covered: Tensor, count: int, *, among: int) -> Tensor:
    """`count` of the `among` keys [N, T, D] that are covered least, as indices [N, count]; of equal ones the first.

    covered [N, T]: cosines, float32. A key that is nearer to one before it in this ranking than the ranking's last is to those that
    cover it is passed over: the one before may come to cover it. If too few are left, the first that were passed over.
    """
    # positive floats rank as their bits do; with the position behind, no two are equal
    ranking = ((covered + 2.0).view(torch.int32).long() << 31) + torch.arange(keys.shape[1], device=keys.device)
    rank, worst = torch.topk(ranking, among, dim=1, largest=False, sorted=False)
    unit = directions(keys, worst)
    near = unit @ unit.transpose(1, 2) > covered.gather(1, worst).amax(dim=1)[:, None, None]
    like = (near & (rank[:, None] < rank[:, :, None])).any(dim=2)
    kept = torch.topk(rank + (like.long() << 62), count, dim=1, largest=False, sorted=False).indices
    return worst.gather(1, kept)


def first_keys(keys: Tensor, positions: Tensor, count: int, *, start: Start, streams: Tensor) -> Tensor:
    """The keys that k-means begins with: keys [..., T, D] at positions [..., T] of heads [..., 1], which broadcast; see `drawn`.
    Returns [N, count] int64, ascending, N all of the former dimensions."""
    few = drawn(positions, count - count // 2 if start == "covering" else count, streams)
    few = few.expand(*keys.shape[:-2], -1).flatten(0, -2)
    return covering(keys.flatten(0, -3), few, count) if few.shape[1] < count else few


@dataclass(frozen=True, slots=True)
class Batches:
    """Of sequences of an index, batches of tokens that become units among themselves, and where the first is. given: their keys
    [R, H, n, T, D], n batches of each sequence; None: one each, whose keys the index has."""

    index: UnitIndex
    first: Sequence[Full]
    given: Tensor | None = None

    def keys(self) -> Tensor:
        """Return the keys [R, H, n, T, D], a copy if the index has them."""
        return self.index.last(self.first, self.index.recent)[:, :, None] if self.given is None else self.given


class BatchGroup:
    """Batches of indexes that differ in nothing but the layer, all of as many tokens and batches: keys [M, H, n, T, D], their
    positions [M, 1, n, T], and the numbers of their heads [M, H, 1, 1], from which random choices derive."""

    def __init__(self, every: Sequence[Batches]) -> None:
        self.every = every
        keys = torch.cat([each.keys() for each in every]) if len(every) > 1 else every[0].keys().contiguous()
        of_rows = [(each.index.first, stream(each.index.context), own) for each in every for own in each.first]
        where = [(first + own.begin, own.begin, number) for first, number, own in of_rows]
        first, begin, streams = torch.tensor(where).to(keys.device, non_blocking=True).t()[:, :, None, None, None].unbind()
        heads, batches, tokens = keys.shape[1:4]
        self.starts = torch.arange(batches, device=keys.device)[:, None] * tokens  # of each batch
        self.positions = first + self.starts + torch.arange(tokens, device=keys.device)
        self.streams = streams + torch.arange(heads, device=keys.device)[:, None, None]
        self.keys, self._first, self._begin = keys, first, begin

    def write(self, digests: Tensor, order: Tensor, stops: Tensor) -> None:
        """Write the units of all batches into the tables: digests [M H n, C, E]; order [M H n, T] of a batch's tokens, in which
        unit c is stops[c] : stops[c + 1], [M H n, C + 1]."""
        many, heads, batches, tokens = self.keys.shape[:4]
        count = stops.shape[1] - 1
        digests = digests.view(many, heads, batches * count, -1).to(self.every[0].index.digests.dtype)
        ends = (stops.view(many, heads, batches, -1)[..., 1:] + self.starts + self._begin).flatten(2)
        ends = torch.cat((self._begin[..., 0].expand(-1, heads, 1), ends), dim=2).int()
        places = (order.view(many, heads, batches, tokens) + self.starts + self._first).int().flatten(2)
        targets: dict[tuple[Full, ...], Target] = {}
        done = 0
        for each in self.every:
            own, rows = tuple(each.first), slice(done, done + len(each.first))
            if own not in targets:
                targets[own] = Target.of(own, heads, self.keys.device)
            at = targets[own]
            assert each.index.order is not None
            each.index.digests[at.units(batches * count)] = digests[rows]
            each.index.stops[at.units(batches * count + 1)] = ends[rows]
            each.index.order[at.places(batches * tokens)] = places[rows]
            done += len(each.first)


def groups(every: Sequence[Batches]) -> Iterator[BatchGroup]:
    """Yield groups of as many batches as have AT_ONCE bytes of keys."""
    some = max(1, AT_ONCE // (len(every[0].first) * every[0].index.recent[0].nbytes))
    for at in range(0, len(every), some):
        yield BatchGroup(every[at : at + some])


def cluster(every: Sequence[Batches], count: int) -> None:
    """Cluster each batch among itself, into `count` units, and write these into the tables. All have as many tokens and batches,
    and their indexes differ in nothing but the layer."""
    for group in groups(every):
        one = group.every[0].index
        assert isinstance(one, ClusterIndex)
        chosen = first_keys(group.keys, group.positions, count, start=one.start, streams=group.streams)
        group.write(*kmeans(group.keys.flatten(0, 2), chosen, distance=one.distance, iterations=one.iterations))


class ClusterIndex(UnitIndex):
    """k-means clusters of the prompt's keys, and of every `batch` tokens that leave the window after it, among themselves.

    A prompt of L tokens gets L / tokens_per_cluster clusters (or exactly `clusters`), a batch gets clusters_per_batch. Until
    a batch is full, its tokens are as many temporary clusters in text order, each with the mean of its keys. Clusters are
    ranked by q.mu and taken whole, the last one cut: its earliest tokens stay. start="covering" gives keys unlike all others, as
    those of a needle are, clusters of their own, whose mean is near them; a random start may leave them among others. On a GPU
    a prompt is clustered on the cache's side stream, beside the layers that follow; the first select() waits for it on the device.
    """

    mapped = True

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
        policy: Policy = "max",
    ) -> None:
        one_of(get_args(Distance), distance=distance)
        one_of(get_args(Start), start=start)
        at_least(1, tokens_per_cluster=tokens_per_cluster, batch=batch, clusters_per_batch=clusters_per_batch)
        at_least(1, iterations=iterations, clusters=clusters)
        if batch % clusters_per_batch:
            raise ConfigError(f"batch is {batch}; it must be a multiple of clusters_per_batch, {clusters_per_batch}")
        self.tokens_per_cluster, self.clusters, self.per_batch = tokens_per_cluster, clusters, clusters_per_batch
        self.distance: Distance = distance
        self.start: Start = start
        self.iterations = iterations
        super().__init__(context, size=batch // clusters_per_batch, batch=batch, width=context.head_dim, policy=policy)

    def build(self, seq: int, first: int, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        """See Index."""
        tokens = keys.shape[1]
        self._whole(seq, first, keys, min(tokens, self.clusters or max(1, tokens // self.tokens_per_cluster)), self._cluster)

    def most_units(self, tokens: int) -> int:
        """See UnitIndex."""
        return super().most_units(tokens) + max(self.clusters or 0, tokens // self.tokens_per_cluster)

    def close(self, full: Sequence[Full], keys: Tensor | None) -> None:
        """See UnitIndex: cluster each batch among itself; single ones with those of other layers, which have theirs at the same
        step."""
        if keys is not None:
            self._cluster(full, keys, self.per_batch)
            return
        context = self.context
        same = context.kv_heads, context.head_dim, context.dtype, context.device, context.seed
        how = self.batch, self.per_batch, self.distance, self.start, self.iterations
        self.defer((ClusterIndex, *same, *how), partial(cluster, count=self.per_batch), Batches(self, full))

    def _cluster(self, first: Sequence[Full], keys: Tensor, count: int) -> None:
        """Cluster batches of sequences, keys [R, H, n, T, D], of which the first is said, each into `count` units, now."""
        cluster([Batches(self, first, keys)], count)
