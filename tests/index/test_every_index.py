"""What holds for every index of units or of tokens, whatever it scores them by."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from seqs import FIRST, Seqs

from kvthaw.cache.index_api import Index, IndexContext
from kvthaw.index.bounds import BoundIndex
from kvthaw.index.clusters import ClusterIndex
from kvthaw.index.exact import ExactIndex
from kvthaw.index.hybrid import HybridIndex
from kvthaw_baselines.index.filters import FilterIndex
from kvthaw_baselines.index.lsh import HashIndex
from kvthaw_baselines.index.nodes import NodeConfig, NodeIndex
from kvthaw_baselines.index.pq import ProductIndex
from kvthaw_baselines.index.static_pages import StaticPageIndex

Make = Callable[[IndexContext], Index]
HYBRID = partial(HybridIndex, page=8, interval=20)
FILLS: dict[str, Make] = {
    "quest": partial(BoundIndex, page=16, spread="max"),
    "arkvale": partial(BoundIndex, page=32, spread="mean"),
    "clusters": partial(ClusterIndex, tokens_per_cluster=10, batch=40, clusters_per_batch=4),
    "nodes": partial(NodeIndex, config=NodeConfig(promote=0.1, nodes_per_batch=4, field=64)),
    "hybrid": partial(HYBRID, share=0.25),
    "static": partial(HYBRID, share=1.0),
    "auto": partial(HYBRID, share="auto"),
    "static_pages": partial(StaticPageIndex, page=8, interval=20),
    "exact": ExactIndex,
    "product": partial(ProductIndex, centroids=8),
    "filter": FilterIndex,
}
"""Those that bring as many rows as they may."""
ALL: dict[str, Make] = FILLS | {"hash": partial(HashIndex, bits=2, tables=12)}
over_all = pytest.mark.parametrize("make", ALL.values(), ids=ALL)


def rows(seqs: Seqs, budget: int, step: int = 100) -> list[list[set[int]]]:
    found = seqs.index.select(seqs.query(step), budget).rows
    return [[set(head.tolist()) - {-1} for head in seq] for seq in found]


SHAPES = [(4, 1, 64, torch.float32), (2, 4, 96, torch.bfloat16), (1, 8, 256, torch.float16), (2, 2, 80, torch.bfloat16)]


@pytest.mark.parametrize(("name", "at"), [(name, (i + turn) % 4) for i, name in enumerate(FILLS) for turn in (0, 2)])
def test_rows_are_valid_at_every_length(name: str, at: int) -> None:
    heads, group, dim, dtype = SHAPES[at]
    seqs = Seqs(FILLS[name], [1, 63, 0, 150], heads=heads, group=group, dim=dim, dtype=dtype)
    for n in (1, 16, 16, 7, 16, 100, 3):
        for budget in (33, 500, 1):
            seqs.select(budget)
        seqs.append(n)
    seqs.select(64)


@over_all
def test_a_sequence_does_not_depend_on_the_others(make: Make) -> None:
    deferred, alone = Seqs(make, [150, 63, 0]), Seqs(make, [63], seeds=[1])
    for step, n in enumerate((16, 40, 16, 300, 3)):
        assert rows(deferred, 50, 70 + step)[1] == rows(alone, 50, 70 + step)[0]
        deferred.append(n)
        alone.append(n)


@over_all
def test_truncate_forgets_and_goes_on(make: Make) -> None:
    seqs, whole = Seqs(make, [100, 100]), Seqs(make, [100, 100])
    for _ in range(10):
        seqs.append(10)
        whole.append(10)
        assert rows(seqs, 60) == rows(whole, 60)
    for length in (204, 150, 131, 36, 4):
        seqs.truncate(0, length)
        assert all(FIRST <= row < length for head in rows(seqs, 500)[0] for row in head)
        rows(whole, 500)
        for _ in range(5):
            seqs.append(10, [0])
            assert rows(seqs, 60)[1] == rows(whole, 60)[1]
        assert rows(seqs, 1000)[0] == [set(range(FIRST, length + 50))] * 2
        rows(whole, 1000)


@over_all
def test_reorder_and_clone(make: Make) -> None:
    seqs, other = Seqs(make, [150, 63, 0]), Seqs(make, [0, 0, 0])
    seqs.append(13)
    rows(seqs, 40)
    other.index.clone_from(seqs.index)
    other.keys, other.queries, other.length = seqs.keys, seqs.queries, list(seqs.length)
    for seq, length in enumerate(seqs.length):
        other.put(seq, length)
    for step, n in enumerate((10, 50, 200, 10)):
        assert rows(other, 40, step) == rows(seqs, 40, step)
        seqs.append(n)
        other.append(n)
    before, which = rows(seqs, 40, 9), [1, 1, 0, 2]
    for name in ("keys", "length", "queries"):
        setattr(seqs, name, [getattr(seqs, name)[seq] for seq in which])
    seqs.index.reorder(which)
    seqs.store.reorder(which)
    assert rows(seqs, 40, 9) == [before[seq] for seq in which]


@pytest.mark.gpu
@over_all
def test_selecting_from_a_captured_graph(make: Make, device: torch.device) -> None:
    seqs = Seqs(make, [400, 90], device=device, dtype=torch.bfloat16)
    seqs.append(8)  # room
    query = seqs.query(0).clone()
    seqs.index.select(query, 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        selection = seqs.index.select(query, 64)
    for step in range(1, 12):
        seqs.deferred.flush()  # as the cache does between captured steps
        seqs.index.join()
        seqs.store.table.on(device)
        query.copy_(seqs.query(step))
        selection.rows.fill_(-9)
        graph.replay()
        eager = seqs.index.select(query, 64)
        assert torch.equal(selection.rows, eager.rows)
        assert torch.equal(selection.counts, eager.counts)
        if eager.log_weight is not None:
            assert selection.log_weight is not None
            torch.testing.assert_close(selection.log_weight, eager.log_weight)
        seqs.append(8)
