"""FreeKV's index against its formulas, in float64, one head at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from seqs import FIRST, Seqs
from torch import Tensor

from kvthaw.cache.index_api import Index, IndexContext
from kvthaw.cache.sequences import Sequences
from kvthaw.errors import ConfigError
from kvthaw_baselines.index.lagged import LaggedIndex

PAGE, TAU = 8, 0.8


def make(shape: IndexContext) -> Index:
    return LaggedIndex(shape, page=PAGE, spread="max", policy="mean", tau=TAU)


def pages(query: Tensor, keys: Tensor, budget: int, scale: float) -> set[int]:
    """Rows of one KV head: query [G, D] and keys [n, D] in float64, positions FIRST .. FIRST + n."""
    parts = [range(at, min(at + PAGE, len(keys))) for at in range(0, len(keys), PAGE)]
    weights = []
    for q in query:
        scores = []
        for part in parts:
            k = keys[list(part)]
            best = torch.maximum(q * k.amin(dim=0), q * k.amax(dim=0)).sum()
            scores.append(best * scale)
        sizes = torch.tensor([len(part) for part in parts]).double()
        logits = torch.stack(scores)
        weights.append((logits - torch.logsumexp(logits + sizes.log(), dim=0)).exp())
    mean = torch.stack(weights).mean(dim=0)
    rows: list[int] = []
    for page in mean.argsort(descending=True).tolist():
        rows += list(parts[page])
    return {FIRST + row for row in rows[:budget]}


@pytest.mark.parametrize("dim", [64, 80])
def test_rows_are_the_definitions(dim: int) -> None:
    seqs = Seqs(make, [203, 60], group=3, dim=dim, build=True)
    shape, corrected = seqs.context, 0
    g = torch.Generator().manual_seed(3)
    query, before = torch.randn(2, shape.q_heads, dim, generator=g), None
    for _ in range(12):
        turn = torch.rand(2, shape.kv_heads, generator=g).repeat_interleave(shape.group, dim=1)[..., None]
        query = (1 - turn) * query + turn * torch.randn(query.shape, generator=g)
        rows = seqs.index.select(query, 40).rows
        for seq, length in enumerate(seqs.length):
            for head in range(shape.kv_heads):
                mine = slice(head * shape.group, (head + 1) * shape.group)
                asked = query[seq, mine].double()
                if before is not None:
                    old = before[seq, mine].double()
                    near = [float(a @ b / (a.norm() * b.norm())) for a, b in zip(asked, old, strict=True)]
                    lags = sum(near) / len(near) >= TAU
                    corrected += not lags
                    asked = old if lags else asked
                keys = seqs.keys[seq][head, FIRST:length].double()
                assert set(rows[seq, head].tolist()) == pages(asked, keys, 40, shape.scale)
        before = query
    assert 8 < corrected < 36, "both must happen"


def test_tau_of_one_is_pages_for_the_own_query() -> None:
    seqs = Seqs(lambda shape: LaggedIndex(shape, page=8, spread="max", policy="mean", tau=1.0), [100])
    for step in (1, 2, 3):
        expected = pages(seqs.query(step)[0, :2].double(), seqs.keys[0][0, FIRST:104].double(), 30, seqs.context.scale)
        assert seqs.sets(30, step)[0][0] == expected


def test_a_sequence_built_anew_has_no_previous_query() -> None:
    seqs = Seqs(lambda shape: LaggedIndex(shape, page=8, spread="max", policy="mean", tau=-1.0), [100, 100])
    fresh = seqs.sets(30, 5)
    assert seqs.sets(30, 6) == fresh, "with tau = -1 every step but the first lags by one"
    keys = seqs.keys[0][:, FIRST:104]
    seqs.index.build(0, FIRST, keys, keys, seqs.queries[0][:, :64])
    later = seqs.sets(30, 6)
    own = Seqs(lambda shape: LaggedIndex(shape, page=8, spread="max", policy="mean", tau=1.0), [100, 100]).sets(30, 6)
    assert later == own, "sequence 0 is new; sequence 1 gets the pages of its last query, which is the same"


def test_lags_only_behind_the_token_before() -> None:
    """Queries of tokens that are dropped again count for nothing, and the one before them still does."""
    seqs = Seqs(make, [100])
    shape = replace(seqs.context, sequences=Sequences())
    index = LaggedIndex(shape, page=8, spread="max", policy="mean", tau=-1.0)
    own = LaggedIndex(seqs.context, page=8, spread="max", policy="mean", tau=1.0)
    keys = seqs.keys[0][:, FIRST:104]
    for each in (index, own):
        each.build(0, FIRST, keys, keys, seqs.queries[0][:, :64])

    def at(length: int, step: int) -> int:
        """Ask with the query of a step, at so many tokens; of which step's query the rows are."""
        assert shape.sequences is not None
        shape.sequences.on_device.lengths = torch.tensor([length], dtype=torch.int32)
        rows = index.select(seqs.query(step), 30).rows
        return next(i for i in range(10) if torch.equal(own.select(seqs.query(i), 30).rows, rows))

    assert [at(110 + i, i) for i in range(4)] == [0, 0, 1, 2]
    assert at(112, 4) == 1, "two tokens were dropped"
    assert at(113, 5) == 4
    assert at(130, 6) == 6, "a dense pass was between"


def test_tau_out_of_range_is_named() -> None:
    with pytest.raises(ConfigError, match=r"tau is 1\.5"):
        Seqs(lambda shape: LaggedIndex(shape, page=8, spread="max", policy="mean", tau=1.5), [20])
