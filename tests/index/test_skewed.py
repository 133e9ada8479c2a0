"""InfiniGen's index against its formulas, in float64, one head at a time."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from seqs import FIRST, Seqs

from kvthaw.errors import ConfigError
from kvthaw_baselines.index.skewed import SkewedIndex
from shapes import DTYPES


@pytest.mark.parametrize("dim", [32, 80])
@pytest.mark.parametrize(("alpha", "most"), [(1.0, 1.0), (4.0, 0.2), (0.5, 1.0)])
def test_rows_are_the_definitions(alpha: float, most: float, dim: int) -> None:
    prompts = [150, 41]
    seqs = Seqs(partial(SkewedIndex, alpha=alpha, most=most), prompts, group=3, dim=dim)
    seqs.append(16)
    kept = math.ceil(0.3 * dim)
    seen = set()
    for step in range(100, 104):
        query = seqs.query(step)
        selection = seqs.index.select(query, 40)
        for seq, length in enumerate(seqs.length):
            gaps, counts = [], []
            for head in range(2):
                mine = slice(3 * head, 3 * head + 3)
                watched = seqs.queries[seq][mine, :64].double().flatten(0, 1)
                keys = seqs.keys[seq][head, FIRST:length].double()
                skew = torch.linalg.svd(watched).Vh.T
                size = (watched @ skew).abs().mean(dim=0) + (keys[: prompts[seq]] @ skew).abs().mean(dim=0)
                best = skew[:, size.topk(kept).indices]
                logits = (query[seq, mine].double() @ best) @ (keys @ best).T * seqs.context.scale
                gap = (logits - logits.amax(dim=1, keepdim=True)).amax(dim=0)
                gaps.append(gap)
                counts.append(int((gap > -alpha).sum()))
            wanted = min(40, math.ceil(sum(counts) / 2), math.ceil(most * (length - FIRST)))
            seen.add(wanted)
            for head in range(2):
                rows = selection.rows[seq, head]
                assert int(selection.counts[seq, head]) == wanted
                assert (rows[wanted:] == -1).all()
                assert set(rows[:wanted].tolist()) == {FIRST + i for i in gaps[head].topk(wanted).indices.tolist()}
    assert len(seen) > 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_channels_are_the_exact_product(dtype: torch.dtype) -> None:
    seqs = Seqs(partial(SkewedIndex, ratio=1.0), [60], dim=32, dtype=dtype)
    index = seqs.index
    assert isinstance(index, SkewedIndex)
    query = seqs.query().unflatten(1, (2, 2))
    exact = query.double() @ seqs.keys[0][None, :, FIRST:64].double().mT
    slack = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 0.15}[dtype]
    assert (index.estimate(query, 60) - exact).abs().max() < slack


def test_what_fits_comes_whole() -> None:
    seqs = Seqs(partial(SkewedIndex, alpha=1e-6), [60, 20], group=1)
    counts = seqs.index.select(seqs.query(), 30).counts
    assert (counts == torch.tensor([[1, 1], [20, 20]])).all()


def test_a_sequence_without_watched_queries() -> None:
    seqs = Seqs(SkewedIndex, [60], build=False)
    keys = seqs.keys[0][:, FIRST:64]
    seqs.index.build(0, FIRST, keys, keys, seqs.queries[0][:, :0])
    assert (seqs.index.select(seqs.query(), 30).counts > 0).all()


OUT_OF_RANGE = [("ratio", 0.0), ("most", 2.0), ("alpha", -1.0)]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_settings_out_of_range_are_named(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        Seqs(partial(SkewedIndex, **{name: value}), [20])


@pytest.mark.parametrize("asked", [1, 2, 5])
def test_rounding_decides_no_channel_that_few_queries_leave_open(asked: int) -> None:
    """Fewer queries than channels, each off by some last bits: the skew is the same, and so are the rows."""
    found = []
    for noise in (0.0, 2e-7):
        seqs = Seqs(SkewedIndex, [3], group=2, build=False)
        queries = seqs.queries[0][:, :asked]
        queries = queries * (1 + noise * torch.randn(queries.shape, generator=torch.Generator().manual_seed(1)))
        keys = seqs.keys[0][:, FIRST : FIRST + 3]
        seqs.index.build(0, FIRST, keys, keys, queries)
        seqs.append(120)
        found.append([seqs.index.select(seqs.query(step), 20).rows for step in range(100, 120)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.sort().values, other.sort().values)
