"""Nodes on the device, against definitions in float64 written from the docstrings."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from seqs import FIRST, Seqs, sample_positions
from torch import Tensor

from kvthaw.errors import ConfigError
from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.rerank import TILE
from kvthaw.kernels.topk import run_length, topk
from kvthaw.kernels.unit_select import launch_choice
from kvthaw_baselines.index.nodes import NodeConfig, NodeIndex
from kvthaw_baselines.kernels import node_scores
from kvthaw_baselines.kernels.stored_scores import launch

SMALL = NodeConfig(promote=0.1, field=TILE, nodes_per_batch=4)


def seqs_of(prompts: list[int], config: NodeConfig = SMALL, **shape: object) -> Seqs:
    return Seqs(partial(NodeIndex, config=config), prompts, **shape)  # type: ignore[arg-type]


def index_of(seqs: Seqs) -> NodeIndex:
    assert isinstance(seqs.index, NodeIndex)
    return seqs.index


def nodes_of(index: NodeIndex, seq: int, head: int) -> list[list[int]]:
    """The positions of every node of a sequence."""
    index.join()
    assert index.order is not None
    stops = index.stops[seq, head, : index.seqs[seq].units + 1].tolist()
    order = index.order[seq, head].tolist()
    return [order[a:b] for a, b in itertools.pairwise(stops)]


def test_every_key_belongs_to_the_nearest_promoted_one() -> None:
    """In the space of T_K: unit vectors, so that the nearest is that of the largest product."""
    seqs = seqs_of([205], heads=2)
    keys = seqs.keys[0][:, FIRST : FIRST + 205].double()
    promoted = sample_positions(FIRST + torch.arange(205), 21, seed=7, layer=3, heads=2)
    for head in range(2):
        c2 = 1.25 * keys[head].square().sum(dim=1).max()
        lifted = torch.cat(
            (keys[head] / c2.sqrt(), (1 - keys[head].square().sum(dim=1, keepdim=True) / c2).clamp(min=0).sqrt()), 1
        )
        near = torch.cdist(lifted, lifted[promoted[head]]).argmin(dim=1)
        expected = [[FIRST + i for i in range(205) if near[i] == c] for c in range(21)]
        nodes = nodes_of(index_of(seqs), 0, head)
        assert [sorted(node) for node in nodes] == expected
        assert sum(node == own for node, own in zip(nodes, expected, strict=True)) < 15, "outliers stand first"


def slow_digest(keys: Tensor, outliers: int) -> Tensor:
    """keys [n, D] float64."""
    mean = keys.mean(dim=0)
    around, left = [mean], list(range(len(keys)))
    for _ in range(outliers):
        apart = [min(float((keys[i] - p).square().sum()) for p in around) for i in left]
        around.append(keys[left[next(i for i, own in enumerate(apart) if own * (1 + 1e-4) >= max(apart))]])
    spread = (keys - mean).square().sum(dim=1).mean().div(keys.shape[1]).sqrt()
    return torch.cat((*around, spread[None]))


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_digests_are_mean_outliers_and_spread(dtype: torch.dtype, near: float) -> None:
    """Of a prompt's nodes, of a full batch's and of those in text order."""
    seqs = seqs_of([150], dtype=dtype)
    seqs.append(57)
    index = index_of(seqs)
    assert index.seqs[0].units == 15 + 4 + 2
    for head in range(2):
        nodes = nodes_of(index, 0, head)
        assert sorted(i for node in nodes for i in node) == list(range(FIRST, FIRST + 207))
        assert nodes[-2:] == [[*range(FIRST + 190, FIRST + 200)], [*range(FIRST + 200, FIRST + 207)]]
        for node, digest in zip(nodes, index.digests[0, head], strict=False):
            keys = seqs.keys[0][head].double()
            wanted = slow_digest(keys[sorted(node)], 2)
            if len(node) > 2 and node[0] < FIRST + 190:  # the outliers stand first, in text order
                assert {tuple(k) for k in keys[node[:2]].tolist()} == {tuple(k) for k in wanted[64:192].view(2, 64).tolist()}
            torch.testing.assert_close(digest[: len(wanted)].double(), wanted, rtol=near, atol=near)


def slow_select(seqs: Seqs, seq: int, head: int, budget: int, field: int, policy: str) -> set[int]:
    """As NodeIndex says, in float64."""
    index, group, scale = index_of(seqs), seqs.context.group, seqs.context.scale
    queries = seqs.query()[seq, head * group : (head + 1) * group].double()
    keys, nodes = seqs.keys[seq][head].double(), nodes_of(index, seq, head)
    digests = index.digests[seq, head].double()
    dim = keys.shape[1]

    def joint(scores: Tensor, sizes: Tensor) -> Tensor:
        weights = scores - torch.logsumexp(scores + sizes.log(), dim=1, keepdim=True)
        return weights.amax(dim=0) if policy == "max" else torch.logsumexp(weights, dim=0)

    merits = torch.empty(group, len(nodes), dtype=torch.float64)
    for g, q in enumerate(queries):
        for u in range(len(nodes)):
            points = digests[u, : 3 * dim].view(3, dim) @ q
            points[0] += 2.0 * q.norm() * digests[u, 3 * dim]
            merits[g, u] = scale * points.max()
    seen: list[int] = []
    for u in joint(merits, torch.tensor([len(node) for node in nodes])).argsort(descending=True).tolist():
        seen += nodes[u][: field - len(seen)]
    true = joint(scale * queries @ keys[seen].T, torch.ones(len(seen)))
    return {seen[i] for i in true.argsort(descending=True).tolist()[:budget]}


@pytest.mark.parametrize("policy", ["max", "mean"])
def test_the_best_rows_of_the_best_nodes(policy: str) -> None:
    config = NodeConfig(promote=0.1, field=TILE, nodes_per_batch=4, policy=policy)  # type: ignore[arg-type]
    seqs = seqs_of([300, 90], config, group=3)
    seqs.append(57)
    for seq, found in enumerate(seqs.sets(20)):
        assert found == [slow_select(seqs, seq, head, 20, TILE, policy) for head in range(2)]


@pytest.mark.skipif(not HAS_TRITON, reason="no Triton")
def test_the_kernels_choose_the_same(device: torch.device) -> None:
    seqs = seqs_of([300, 3], heads=1, dtype=torch.bfloat16, device=device)
    seqs.append(57)
    index, query, scale = index_of(seqs), seqs.query(), seqs.context.scale
    assert index.wanted.tolist() == [TILE, 60]
    assert index.order is not None
    scores, parts = node_scores.launch(query, index.digests, index.stops, index.counts, scale=scale, reach=2.0)
    how = {"first": FIRST, "budget": TILE, "policy": "max"}
    rows, _ = launch_choice(scores, parts, index.stops, index.order, index.counts, **how)  # type: ignore[arg-type]
    run = run_length(TILE, 20)
    assert run is not None
    table = seqs.store.table.on_cpu().to(device)
    true = launch(query, table, seqs.store.block_size, rows, index.wanted, scale=scale, run=run)
    found, counts = topk(true, rows, index.wanted, 20, 0, scale, "max")
    assert (counts == 20).all()
    for seq, sets in enumerate(seqs.sets(20)):
        assert [set(own.tolist()) for own in found[seq]] == sets


def test_a_key_unlike_its_node_is_found() -> None:
    """Among 4,000 keys, in a field of view of 64 rows, also where its node is larger."""
    seqs = seqs_of([1], NodeConfig(field=TILE), heads=1, group=1, more=0)
    keys = torch.randn(1, FIRST + 4000, 64, generator=torch.Generator().manual_seed(1))
    query = seqs.query()
    for place in (11, 1234, 3999):
        odd = keys.clone()
        odd[0, FIRST + place] += 9.0 * query[0, 0] / query[0, 0].norm()
        seqs.store.truncate(0, 0)
        seqs.store.append(0, torch.stack((odd, odd), dim=2))
        seqs.index.build(0, FIRST, odd[:, FIRST:], odd[:, FIRST:], query[0, :, None])
        assert FIRST + place in seqs.index.select(query, 4).rows[0, 0].tolist()


def test_a_field_of_view_for_all_is_exact() -> None:
    seqs = seqs_of([400], NodeConfig(field=512), group=1)
    keys = seqs.keys[0][:, : FIRST + 400]
    for head, found in enumerate(seqs.sets(30)[0]):
        scores = keys[head, FIRST:] @ seqs.query()[0, head]
        assert found == set((scores.topk(30).indices + FIRST).tolist())


def test_nodes_do_not_depend_on_the_pieces_in_which_tokens_came() -> None:
    one, many = seqs_of([100, 30]), seqs_of([100, 30])
    one.append(90)
    for n in (16, 16, 16, 1, 30, 11):
        many.append(n)
    a, b = index_of(one), index_of(many)
    for seq in range(2):
        assert a.seqs[seq] == b.seqs[seq]
        assert [nodes_of(a, seq, h) for h in range(2)] == [nodes_of(b, seq, h) for h in range(2)]
        used = a.seqs[seq].units
        torch.testing.assert_close(a.digests[seq, :, :used], b.digests[seq, :, :used])
    assert one.sets(33) == many.sets(33)


def test_a_clone_goes_on() -> None:
    one = seqs_of([150, 63])
    one.append(23)
    one.select(30)
    other = NodeIndex(one.context, SMALL)
    assert isinstance(one.index, NodeIndex)
    other.clone_from(one.index)
    one_sets, one.index = one.sets(30), other
    assert one.sets(30) == one_sets
    one.append(40)
    one.select(90)  # a wider field of view than the budget before


def test_settings_out_of_range_are_named() -> None:
    for options, message in (
        ({"promote": 0.0}, "promote is 0.0; it must be above 0 and at most 0.5"),
        ({"outliers": 17}, "outliers is 17"),
        ({"spread": float("nan")}, "spread is nan"),
        ({"field": 0}, "field is 0; it must be at least 1"),
        ({"nodes_per_batch": 0}, "nodes_per_batch is 0; it must be at least 1"),
        ({"policy": "mean_query"}, "policy is 'mean_query'; it must be one of max, mean"),
    ):
        with pytest.raises(ConfigError, match=message):
            NodeConfig(**options)  # type: ignore[arg-type]
