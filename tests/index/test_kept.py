"""Indexes that keep rows over the steps, without a layer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from seqs import FIRST, Seqs

from kvthaw.cache.index_api import IndexContext
from kvthaw.cache.pool import Slab
from kvthaw.cache.sequences import Sequences
from kvthaw_baselines.index import kept
from kvthaw_baselines.index.heavy import HeavyIndex
from kvthaw_baselines.index.kept import Agree, KeptIndex, observed
from kvthaw_baselines.index.snap import FreshSnapIndex, SnapIndex


@pytest.mark.parametrize("block", [1, 200, 1 << 24])
@pytest.mark.parametrize("agree", ["mean", "max"])
@pytest.mark.parametrize(("heads", "group", "width", "tokens"), [(2, 3, 7, 40), (1, 1, 5, 5), (3, 2, 1, 9)])
def test_observed_is_causal_attention(
    block: int, agree: Agree, heads: int, group: int, width: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "_SCORES", block)
    queries, keys = torch.randn(heads, group, width, 16), torch.randn(heads, tokens, 16)
    expected = torch.zeros(heads, group, tokens, dtype=torch.float64)
    for h in range(heads):
        for g in range(group):
            for w in range(width):
                stop = tokens - width + w + 1
                scores = torch.exp(queries[h, g, w].double() @ keys[h, :stop].double().T * 0.3)
                expected[h, g, :stop] += scores / scores.sum()
    merged = expected.mean(dim=1) if agree == "mean" else expected.amax(dim=1)
    torch.testing.assert_close(observed(queries, keys, scale=0.3, agree=agree).double(), merged, atol=1e-5, rtol=1e-5)


def prompt(seqs: Seqs, seq: int, tokens: int) -> None:
    """A prompt of which 10 more tokens stand behind those that are indexed."""
    index, end = seqs.index, FIRST + tokens
    seqs.put(seq, end + 10)
    keys = seqs.keys[seq][:, FIRST:end]
    index.build(seq, FIRST, keys, keys, seqs.queries[seq][:, :64])
    seqs.length[seq] = end


def rows(seqs: Seqs, budget: int) -> list[list[set[int]]]:
    found = seqs.index.select(seqs.query(), budget)
    assert found.rows.shape[2] == budget
    assert torch.equal((found.rows >= 0).sum(dim=2).int(), found.counts)
    return [[set(head.tolist()) - {-1} for head in seq] for seq in found.rows]


@pytest.mark.parametrize("make", [SnapIndex, HeavyIndex, partial(FreshSnapIndex, interval=20)])
def test_the_number_of_rows_may_come_late_and_change(make: type[KeptIndex]) -> None:
    """Everything is kept until the first select(), and of too many the best."""
    late, known = Seqs(make, [0, 0]), Seqs(lambda shape: make(replace(shape, rows=30)), [0, 0])
    for seqs in (late, known):
        prompt(seqs, 0, 150)
        prompt(seqs, 1, 20)
    assert rows(late, 30) == rows(known, 30)
    assert [len(head) for seq in rows(late, 30) for head in seq] == [30, 30, 20, 20]
    fewer = rows(late, 10)
    assert all(a <= b for one, other in zip(fewer, rows(known, 30), strict=True) for a, b in zip(one, other, strict=True))
    assert rows(late, 50) == fewer, "what was evicted does not come back"
    late.append(16)
    assert [len(head) for seq in rows(late, 50) for head in seq] == [26] * 4


@pytest.mark.parametrize("make", [SnapIndex, HeavyIndex])
def test_truncate_reorder_and_clone(make: type[KeptIndex]) -> None:
    seqs = Seqs(lambda shape: make(replace(shape, rows=40)), [0, 0, 0])
    prompt(seqs, 0, 150)
    prompt(seqs, 2, 35)
    before = rows(seqs, 40)
    assert before[1] == [set(), set()]
    other = Seqs(lambda shape: make(replace(shape, rows=40)), [0, 0, 0])
    other.index.clone_from(seqs.index)
    assert rows(other, 40) == before
    seqs.index.reorder([2, 0, 0, 1])
    assert rows(seqs, 40)[:3] == [before[2], before[0], before[0]]
    seqs.index.truncate(1, 60)
    seqs.index.truncate(2, FIRST)
    after = [[set(head.tolist()) - {-1} for head in seq] for seq in seqs.index.select(torch.zeros(4, 4, 64), 40).rows]
    assert after == [before[2], [{row for row in head if row < 60} for head in before[0]], [set()] * 2, [set()] * 2]


def test_a_query_that_was_taken_back_pays_nothing() -> None:
    """Nothing to the tokens that are kept, and what came into the ring with it starts over."""

    def near(context: IndexContext) -> IndexContext:
        slab = Slab(1, 2, 64, context.regions, 40, dtype=context.dtype, device=context.device)
        slab.data.normal_()
        clock = Sequences()
        clock.on_device.lengths = torch.tensor([420], dtype=torch.int32)
        return replace(context, rows=40, slab=slab, sequences=clock)

    seqs = Seqs(lambda context: HeavyIndex(near(context)), [0])
    prompt(seqs, 0, 400)
    kept = rows(seqs, 40)
    scores = seqs.index.tables["scores"].clone()
    seqs.index.truncate(0, FIRST + 400)
    assert not seqs.index.tables["near"].any()
    seqs.index.add()
    assert torch.equal(seqs.index.tables["scores"], scores)
    assert rows(seqs, 40) == kept
    seqs.index.add()
    assert (seqs.index.tables["scores"] > scores).all()


@pytest.mark.gpu
@pytest.mark.parametrize("make", [SnapIndex, HeavyIndex, partial(FreshSnapIndex, interval=20)])
def test_selecting_from_a_captured_graph(make: type[KeptIndex], device: torch.device) -> None:
    """A step's work, the scores that it adds to included, is the same replayed."""

    def near(shape: IndexContext) -> IndexContext:
        slab = Slab(2, 2, 64, shape.regions, 40, dtype=shape.dtype, device=device)
        torch.manual_seed(0)
        slab.data.normal_()
        clock = Sequences()
        clock.on_device.lengths = torch.tensor([420, 400], dtype=torch.int32, device=device)
        clock.on_device.starts = torch.tensor([404, 390], dtype=torch.int32, device=device)
        clock.on_device.live = torch.ones(2, dtype=torch.int32, device=device)
        return replace(shape, rows=40, slab=slab, sequences=clock)

    replayed, eager = (Seqs(lambda shape: make(near(shape)), [0, 0], device=device) for _ in range(2))
    for seqs in (replayed, eager):
        prompt(seqs, 0, 400)
        prompt(seqs, 1, 386)
        seqs.index.select(seqs.query(0), 40)
    query = replayed.query(1).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        selection = replayed.index.select(query, 40)
    for step in range(1, 6):
        query.copy_(replayed.query(step))
        graph.replay()
        found = eager.index.select(eager.query(step), 40)
        assert torch.equal(selection.rows, found.rows)
        for table, expected in zip(replayed.index.tensors(), eager.index.tensors(), strict=True):
            torch.testing.assert_close(table, expected)
