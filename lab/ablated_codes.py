"""ParisKV's index with a part replaced: the ablations of figure 10, and query heads that choose rows of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from kvthaw.cache.index_api import IndexContext, Method, Selection
from kvthaw.errors import ConfigError, one_of
from kvthaw.index.codes import CodesIndex
from kvthaw.index.joined import joined
from kvthaw.kernels.encode import CENTROIDS, SUB, count
from kvthaw.kernels.query import Rotated, in_bytes, rotate_queries
from kvthaw.kernels.srht import Rotation, padded, srht
from kvthaw.kernels.tiers import definition, pack
from kvthaw.methods.pariskv import pariskv
from kvthaw.methods.pariskv_plus import pariskv_plus
from kvthaw_baselines.index.pq import assign

_SAMPLE = 8192
"""Keys from which centroids are learned."""
_ROUNDS = 10


class PlainCodesIndex(CodesIndex, tested=True):
    """CodesIndex on keys that are not rotated, for `rotate=False`."""

    def __init__(self, context: IndexContext, *, rotate: bool = False, **options: Any) -> None:
        super().__init__(replace(context, deferred=None), **options)
        if not rotate:
            self.rotation = identity(context.head_dim, context.device)


class LearnedCodesIndex(PlainCodesIndex, tested=True):
    """CodesIndex whose centroids are learned on the prompt, which ParisKV replaces by sign patterns.

    One k-means a KV head and subspace runs once, on the keys of the prompt, of unit length if `normalise`. Keys of the answer are
    assigned to centroids that may no longer fit them.
    """

    def __init__(self, context: IndexContext, *, rotate: bool, normalise: bool, **options: Any) -> None:
        super().__init__(context, rotate=rotate, **options)
        self.normalise, self.traits = normalise, replace(self.traits, grows=False)
        self.tables.add("learned", (context.kv_heads, self.rotation.padded // SUB, CENTROIDS, SUB), torch.float32)

    def build(self, seq: int, first: int, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        self.make_room(seq + 1, 0)
        if keys.shape[1]:
            points = subspaces(keys, self.rotation, normalise=self.normalise)
            self.truncate(seq, 0)
            self.tables["learned"][seq] = learn(points, self.context.seed)
        super().build(seq, first, keys, values, queries)

    def append(self, seqs: Sequence[int], keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        super().append(seqs, keys, values, queries)
        stops = [self.counts[seq] for seq in seqs]
        starts = [stop - keys.shape[2] for stop in stops]
        count(self.summaries, seqs, starts, stops, -1)  # of sign patterns
        for seq, own, start, stop in zip(seqs, keys, starts, stops, strict=True):
            points = subspaces(own, self.rotation, normalise=self.normalise)
            self.tables["ids"][seq, :, :, start:stop] = assign(points, self.tables["learned"][seq])
        count(self.summaries, seqs, starts, stops)

    def votes(self, query: Tensor, totals: Tensor) -> tuple[Rotated, Tensor]:
        mean, batch = self.policy == "mean_query", len(query)
        rotated = in_bytes(rotate_queries(query, self.context.kv_heads, self.rotation, mean=mean))
        similarity = torch.einsum("lhpjb,lhbcj->lhpbc", rotated.values, self.tables["learned"][:batch])
        votes = definition(similarity, self.summaries.sizes[:batch], self.tables["limits"][:batch])
        totals.zero_()
        return rotated, pack(votes)


class EachHeadCodesIndex(CodesIndex, tested=True):
    """CodesIndex whose G query heads of a KV head choose budget // G rows each and attend to no others."""

    def select(self, query: Tensor, budget: int) -> Selection:
        """See Index. Raises ConfigError for fewer rows than query heads."""
        group = self.context.group
        if 0 < budget < group:
            raise ConfigError(f"{budget} rows are to be selected; it must be at least {group}, the query heads of a KV head")
        self.join()
        heads = query.unflatten(1, (self.context.kv_heads, group, -1)).unbind(dim=2)
        own = [self.best(head.flatten(1, 2).contiguous(), budget // group).rows for head in heads]
        return Selection(*joined(torch.stack(own, dim=2), budget), partial=self.attention(query))


def candidates(index: CodesIndex, query: Tensor, budget: int) -> Tensor:
    """Return the rows that the collisions leave for the codes to rank: index.select(query, budget) selects a subset of them.

    query: [B, Hq, D].

    A region of n tokens has ceil(beta n) candidates or the fixed number, at least budget and at most n. A sequence below
    dense_below has none. Only the number of candidates on the device changes, as in a select of the same budget.

    Returns [B, H, width] int32, token positions in ascending order, padded with -1. Candidates of heads that choose alone come
    without repeats, in descending order. Raises ConfigError as select does.
    """
    index.join()
    if not isinstance(index, EachHeadCodesIndex):
        return _together(index, query, budget)
    heads = query.unflatten(1, (index.context.kv_heads, index.context.group, -1)).unbind(dim=2)
    each = [_together(index, head.flatten(1, 2).contiguous(), budget // len(heads)) for head in heads]
    every = torch.cat(each, dim=2).sort(dim=2, descending=True).values
    again = torch.nn.functional.pad(every[..., 1:] == every[..., :-1], (1, 0))
    return every.masked_fill(again, -1).sort(dim=2, descending=True).values


def _together(index: CodesIndex, query: Tensor, budget: int) -> Tensor:
    _, (places, _), wanted = index.collect(query, budget)
    known = torch.arange(places.shape[2], device=places.device) < wanted[:, None]
    return torch.where(known[:, None], places + index.first, -1)


def identity(dim: int, device: torch.device | str = "cpu") -> Rotation:
    """Return the rotation that changes no vector, with the same padding."""
    width = padded(dim)
    basis = torch.zeros((max(16, width), max(16, width)), dtype=torch.int8)
    basis[:dim, :dim] = torch.eye(dim, dtype=torch.int8)
    return Rotation(dim, width, 1.0, basis.to(device))


def subspaces(keys: Tensor, rotation: Rotation, *, normalise: bool) -> Tensor:
    """Rotate keys [H, n, D] and split them: [H, B, n, 8] float32.

    normalise: give them unit length before.
    """
    x = keys.float()
    if normalise:
        x = torch.nn.functional.normalize(x, dim=-1)
    y = srht(x, rotation)
    return y.reshape(*y.shape[:2], -1, SUB).transpose(1, 2).contiguous()


def learn(points: Tensor, seed: int) -> Tensor:
    """Return 256 centroids of points [H, B, n, 8] by k-means on an evenly spread sample: [H, B, 256, 8]. A centroid without points
    stays."""
    n = points.shape[2]
    sample = points[:, :, torch.linspace(0, n - 1, min(n, _SAMPLE), device=points.device).long()]
    size = sample.shape[2]
    generator = torch.Generator().manual_seed(seed)
    start = torch.randperm(size, generator=generator).repeat(-(-CENTROIDS // size))[:CENTROIDS]
    centroids = sample[:, :, start.to(points.device)].clone()
    for _ in range(_ROUNDS):
        ids = assign(sample, centroids).long()
        sums = torch.zeros_like(centroids).scatter_add_(2, ids[..., None].expand_as(sample), sample)
        sizes = sums.new_zeros((*ids.shape[:2], CENTROIDS)).scatter_add_(2, ids, torch.ones_like(sample[..., 0]))
        centroids = torch.where(sizes[..., None] > 0, sums / sizes.clamp(min=1)[..., None], centroids)
    return centroids


def pariskv_ablated(
    *, rotate: bool = True, centroids: Literal["signs", "learned"] = "signs", normalise: bool = True, **options: Any
) -> Method:
    """Select as pariskv does, without a part of it (figure 10).

    rotate: whether keys and queries are rotated.
    centroids: "learned" learns them from the prompt's keys; sign patterns depend on no key.
    normalise: whether keys have unit length for learning.
    Other options: pariskv's.
    """
    one_of(("signs", "learned"), centroids=centroids)
    if centroids == "learned":
        return _with(pariskv(**options), partial(LearnedCodesIndex, rotate=rotate, normalise=normalise))
    return _with(pariskv(**options), partial(PlainCodesIndex, rotate=rotate))


def pariskv_plus_ablated(*, votes: Literal["tiered", "binary"] = "tiered", rho: float | None = None, **options: Any) -> Method:
    """Select as pariskv-plus does, with pariskv's votes.

    votes, rho: as for pariskv.
    Other options: pariskv-plus's.
    """
    one_of(("tiered", "binary"), votes=votes)
    method = pariskv_plus(**options)
    assert isinstance(method.index, partial)
    ratios = replace(method.index.keywords["ratios"], rho=rho, tiered=votes == "tiered")
    return replace(method, index=partial(CodesIndex, **method.index.keywords | {"graded": False, "ratios": ratios}))


def pariskv_each(**options: Any) -> Method:
    """Select as pariskv does, for each query head alone. Options: pariskv's."""
    return _with(pariskv(**options), EachHeadCodesIndex)


def pariskv_plus_each(**options: Any) -> Method:
    """Select as pariskv-plus does, for each query head alone. Options: pariskv-plus's."""
    return _with(pariskv_plus(**options), EachHeadCodesIndex)


def _with(method: Method, index: Any) -> Method:
    assert isinstance(method.index, partial)
    return replace(method, index=partial(index, **method.index.keywords))
