"""Full attention, its exact top-k, a sliding window, IceCache's tree and ParisKV, each against its formulas in float64. The other
methods' definitions stand in the tests of their own and of their indices."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from one_layer import SCALE, OneLayer
from torch import Tensor

from kvthaw.cache.host import HostStore
from kvthaw.cache.index_api import IndexContext
from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.layer_base import AttentionParams
from kvthaw.cache.plan import Settings
from kvthaw.index.forest import TreeIndex
from kvthaw.index.tree_config import TreeConfig, directions
from kvthaw.kernels.srht import signs
from kvthaw.methods import resolve
from kvthaw.regions import Regions
from levels import draw_level


def attended(one: OneLayer, at: int, visible: list[set[int]] | None = None) -> Tensor:
    """softmax(q.k scale) v over the visible tokens, [Hq, D] float64."""
    values = one.values[0, :, : at + 1].double()
    return (one.weights(at, visible) @ values).flatten(0, 1)


def test_full_attends_to_everything() -> None:
    torch.manual_seed(1)
    heads, group, total, dim = 2, 3, 70, 16
    query = torch.randn(1, heads * group, total, dim)
    keys, values = torch.randn(2, 1, heads, total, dim).unbind()
    cache, out = KVCache(Settings(resolve("full")), [0], 1), torch.empty(0)
    for start, stop in ((0, 60), (60, 61), (61, 62), (62, 70)):
        part = (x[:, :, start:stop] for x in (query, keys, values))
        out = cache.attend(cache.layers[0], *part, AttentionParams(SCALE))
        for at in range(start, stop):
            folded = query[0, :, at].double().view(heads, group, dim)
            weights = torch.softmax(folded @ keys[0, :, : at + 1].double().transpose(1, 2) * SCALE, dim=2)
            expected = (weights @ values[0, :, : at + 1].double()).flatten(0, 1)
            torch.testing.assert_close(out[0, :, at - start].double(), expected, rtol=1e-5, atol=1e-5)


def test_streaming_attends_to_sink_and_window() -> None:
    torch.manual_seed(2)
    one = OneLayer("streaming", 200, 6, budget=48)
    assert one.layer.plan is not None
    sink, window = one.layer.plan.regions.sink, one.layer.plan.regions.window
    assert sink + window + 1 == 48
    for at in range(200, 206):
        one.out = one.take(at, at + 1)
        start = one.layer.indexed(0)
        assert window <= at + 1 - start <= window + 1  # the buffer holds one
        seen = set(range(sink)) | set(range(start, at + 1))
        torch.testing.assert_close(one.out[:, 0].double(), attended(one, at, [seen, seen]), rtol=1e-5, atol=1e-5)


def test_oracle_attends_to_the_largest_products() -> None:
    torch.manual_seed(3)
    one = OneLayer("oracle", 300, 5, budget=64)
    assert one.layer.plan is not None
    regions, count = one.layer.plan.regions, one.layer.plan.rows
    for at in range(300, 305):
        chosen = one.step()
        start = one.layer.indexed(0)
        folded = one.query[0, :, at].double().view(one.heads, one.group, -1)
        region = folded @ one.keys[0, :, regions.sink : start].double().transpose(1, 2) * SCALE
        best = torch.softmax(region, dim=2).amax(dim=1).topk(count).indices + regions.sink
        assert chosen == [set(rows.tolist()) for rows in best]
        held = set(range(regions.sink)) | set(range(start, at + 1))
        expected = attended(one, at, [held | rows for rows in chosen])
        torch.testing.assert_close(one.out[:, 0].double(), expected, rtol=1e-5, atol=1e-5)


@functools.cache
def levels() -> tuple[Tensor, Tensor]:
    """Lloyd-Max thresholds and centres of x = |u_j|, whose square is Beta(1/2, (m - 1) / 2) at m = 8, so that its density is as
    (1 - x^2)^2.5. From the definition: centres are the means between thresholds, thresholds the middle of centres."""

    def mass(x: Tensor) -> Tensor:
        """The density's integral from 0."""
        y = 1 - x * x
        return x * (y**2.5 / 6 + 5 / 24 * y**1.5 + 5 / 16 * y**0.5) + 5 / 16 * torch.asin(x)

    centres, ends = torch.arange(1, 9).double() / 10, torch.tensor([0.0, 1.0]).double()
    for _ in range(3000):
        thresholds = (centres[1:] + centres[:-1]) / 2
        edges = torch.cat((ends[:1], thresholds, ends[1:]))
        centres = -((1 - edges * edges) ** 3.5 / 7).diff() / mass(edges).diff()
    return thresholds, centres


def walsh(width: int) -> Tensor:
    """Sylvester's construction: H_1 = [1], H_2n = [[H, H], [H, -H]]."""
    made = torch.ones(1, 1).double()
    while len(made) < width:
        made = torch.cat((torch.cat((made, made), dim=1), torch.cat((made, -made), dim=1)))
    return made


@pytest.mark.parametrize(("preset", "group", "dim"), [("paper", 1, 64), ("paper", 1, 80), ("code", 3, 32)])
def test_pariskv_takes_the_best_codes_among_those_that_collide_most(preset: str, group: int, dim: int) -> None:
    """Section 4.1 and appendix B.2.1: signs, tiers of votes, codes of 4 bits with their corrected weights. With several query heads
    as in the authors' code, which averages the queries."""
    torch.manual_seed(dim)
    rho, beta, rows, total = 0.4, 0.2, 20, 500
    options = {"preset": preset, "rho": rho, "beta": beta, "window": 16, "buffer": 8}
    one = OneLayer("pariskv", total, 3, group=group, dim=dim, budget=None, retrieved=rows, **options)
    plan = one.layer.plan
    assert plan is not None
    thresholds, centres = levels()
    diagonal = signs(dim, 0).double()  # drawn
    width = len(diagonal)

    def rotated(x: Tensor) -> Tensor:
        """SRHT: R = H D / sqrt(d), padded with zeros; in subspaces of 8."""
        padded = torch.nn.functional.pad(x.double(), (0, width - dim))
        return (padded * diagonal @ walsh(width) / math.sqrt(width)).unflatten(-1, (-1, 8))

    at, chosen, sink = total, one.step(), plan.regions.sink
    stop = one.layer.indexed(0)
    for head in range(one.heads):
        keys = one.keys[0, head, sink:stop]
        query = rotated(one.query[0, head * group : (head + 1) * group, at].double().mean(dim=0))
        k = rotated(keys)  # [n, subspaces, 8]
        n = len(k)
        positive = k >= 0
        ids = (positive.long() << torch.arange(8)).sum(dim=2)
        votes = torch.zeros(n, dtype=torch.int64)
        for b in range(k.shape[1]):
            patterns = torch.where((torch.arange(256)[:, None] >> torch.arange(8)) & 1 == 1, 1.0, -1.0).double()
            ranked = (patterns @ query[b]).argsort(descending=True).tolist()
            covered = 0
            for centroid in ranked:  # from the nearest on, while the keys of those before are less than a tier's end
                ends = [math.ceil(share * rho * n - 1e-9) for share in (0.05, 0.15, 0.30, 0.50, 0.75, 1.0)]
                votes[ids[:, b] == centroid] += sum(covered < end for end in ends)
                covered += int((ids[:, b] == centroid).sum())
        candidates = sorted(range(n), key=lambda i: (-int(votes[i]), i))[: math.ceil(beta * n - 1e-9)]
        unit = k / k.norm(dim=2, keepdim=True)
        decoded = centres[torch.bucketize(unit.abs(), thresholds)] * torch.where(positive, 1.0, -1.0)
        alpha = (decoded * unit).sum(dim=2)
        weight = (k.norm(dim=2) / alpha).bfloat16().double()  # |k| r / alpha, kept in bfloat16
        estimate = (weight * (decoded * query).sum(dim=2)).sum(dim=1)
        assert float((estimate - (k * query).sum(dim=(1, 2))).norm() / (k * query).sum(dim=(1, 2)).norm()) < 0.15
        found = {row - sink for row in chosen[head]}
        assert len(found) == rows
        assert found <= set(candidates)
        best = sorted(candidates, key=lambda i: -float(estimate[i]))[:rows]
        near = 0.02 * float(estimate.std())  # kvthaw rounds the query that is estimated with to bytes
        assert all(abs(float(estimate[i] - estimate[best[-1]])) < near for i in found ^ set(best))


@pytest.mark.parametrize("n", [40, 700])
@pytest.mark.parametrize("descend", ["node", "level", "digest"])
def test_icecache_takes_the_pages_of_the_nearest_points(n: int, descend: str) -> None:
    """Section 3 with beams that hold everything, so that nothing is approximate but what the paper wants so."""
    dim, size = 32, 16
    config = TreeConfig(
        promote=0.1,
        page_size=size,
        descend=descend,
        query_beam=n,
        build_beam=n,
        query_retrieve_share=1.0,
        build_retrieve_share=1.0,
    )
    keys = torch.randn(1, n, dim, generator=torch.Generator().manual_seed(n))
    store = HostStore(1, 1, dim, torch.float32, block_size=64)
    store.append(0, torch.stack((keys, keys), dim=2))
    shape = IndexContext(3, 1, 1, dim, torch.float32, torch.device("cpu"), store, Regions(4, 16, 16), scale=SCALE)
    index = TreeIndex(shape, config)
    index.build(0, 0, keys, keys, torch.empty(1, 0, dim))

    k = keys[0].double()
    radius = 1.25**0.5 * k.norm(dim=1).max()  # c may be any bound; kvthaw leaves room for longer keys
    lifted = torch.cat((k / radius, (1 - (k.norm(dim=1) / radius).square()).clamp_min(0).sqrt()[:, None]), dim=1)  # T_K
    levels = [draw_level(config, 3, 0, i) for i in range(n)]
    above = dict(itertools.pairwise(sorted(set(levels))))
    nodes: dict[int, list[int]] = {}
    for i, level in enumerate(levels):
        ups = [j for j, other in enumerate(levels) if other == above.get(level)]
        nearest = min(ups, key=lambda j: float((lifted[i] - lifted[j]).square().sum())) if ups else -1
        nodes.setdefault(nearest, []).append(i)
    direction = directions(config, 3, 0, dim).double()[0]
    pages = []
    for members in nodes.values():
        members.sort(key=lambda i: float(lifted[i] @ direction))
        count = math.ceil(len(members) / size)
        edges = [len(members) * i // count for i in range(count + 1)]
        pages += [set(members[a:b]) for a, b in itertools.pairwise(edges)]
    query = torch.randn(dim, generator=torch.Generator().manual_seed(n + 1))
    product = k @ query.double()
    pages.sort(key=lambda page: -max(float(product[i]) for i in page))
    for count in (1, 2, len(pages) // 2):
        expected = set().union(*pages[:count])
        found = index.select(query[None, None], len(expected))
        assert set(found.rows[0, 0, : int(found.counts[0, 0])].tolist()) == expected
