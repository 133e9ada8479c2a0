"""Twilight's pruning against its formulas, in float64, one head at a time."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from seqs import Seqs
from torch import Tensor

from kvthaw.cache.index_api import IndexContext
from kvthaw.errors import ConfigError
from kvthaw.index.bounds import BoundIndex
from kvthaw.index.exact import ExactIndex
from kvthaw_baselines.index.pruned import PrunedIndex, quantise
from shapes import DTYPES

PAGES = partial(BoundIndex, page=8, spread="max")


def make(shape: IndexContext, p: float = 0.85, spare: int = 3) -> PrunedIndex:
    return PrunedIndex(shape, index=PAGES, p=p, spare=spare)


def coded(keys: Tensor) -> Tensor:
    """Keys [n, D] as 4 bits a channel say them, in float64."""
    low, high = keys.amin(dim=1, keepdim=True), keys.amax(dim=1, keepdim=True)
    step = (high - low) / 15
    return low + step * ((keys - low) / step).round().clamp(0, 15)


@pytest.mark.parametrize("dim", [64, 80, 63])
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_in_four_bits(dim: int, dtype: torch.dtype) -> None:
    keys = torch.randn(2, 30, dim).to(dtype)
    codes, grids = quantise(keys)
    assert codes.shape == (2, 30, (dim + 1) // 2)
    whole = torch.stack((codes & 15, codes >> 4), dim=3).flatten(2)[..., :dim].double()
    for head in range(2):
        back = grids[head, :, :1].double() + grids[head, :, 1:].double() * whole[head]
        assert ((back - keys[head].double()).abs() <= grids[head, :, 1:].double() * 0.5001).all()


def test_a_key_of_one_value_has_no_steps() -> None:
    codes, grids = quantise(torch.full((1, 1, 4), 3.0))
    assert codes.tolist() == [[[0, 0]]]
    assert grids.tolist() == [[[3.0, 0.0]]]


@pytest.mark.parametrize("budget", [20, 48])
@pytest.mark.parametrize("p", [0.3, 0.85, 1.0])
def test_rows_are_the_definitions(budget: int, p: float) -> None:
    seqs = Seqs(partial(make, p=p), [400, 77], group=3)
    shape = seqs.context
    proposals, scale = Seqs(PAGES, [400, 77], group=3).index, shape.scale
    pruned = 0
    for step in range(100, 104):
        query = 2 * seqs.query(step)
        rows, counts = (x.clone() for x in (lambda s: (s.rows, s.counts))(seqs.index.select(query, budget)))
        proposed = proposals.select(query, 3 * budget).rows
        for seq in range(2):
            for head in range(shape.kv_heads):
                found = [row for row in proposed[seq, head].tolist() if row >= 0]
                keys = coded(seqs.keys[seq][head, found].double())
                best: dict[int, float] = {}
                for g in range(head * shape.group, (head + 1) * shape.group):
                    weights = torch.softmax(keys @ query[seq, g].double() * scale, dim=0)
                    total = 0.0
                    for i in weights.argsort(descending=True).tolist():
                        if total >= p - 1e-9:
                            break
                        total += float(weights[i])
                        best[found[i]] = max(best.get(found[i], 0.0), float(weights[i]))
                expected = set(sorted(best, key=lambda row: -best[row])[:budget])
                own = rows[seq, head].tolist()
                n = int(counts[seq, head])
                assert set(own[:n]) == expected
                assert own[n:] == [-1] * (budget - n)
                pruned += n < budget
    assert (pruned > 0) == (p < 1)


def test_what_fits_is_not_pruned() -> None:
    seqs = Seqs(partial(make, p=0.1), [400, 30])
    counts = seqs.index.select(3 * seqs.query(), 48).counts
    assert (counts[1] == 30).all()
    assert (counts[0] < 48).all()


def test_sharp_heads_read_less_than_flat_ones() -> None:
    seqs = Seqs(make, [600])
    counts = [int(seqs.index.select(sharp * seqs.query(), 200).counts.sum()) for sharp in (0.5, 2, 8)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 4 * counts[2]


def test_appended_and_truncated_with_the_index_inside() -> None:
    exact = partial(PrunedIndex, index=ExactIndex, p=0.85, spare=2)
    one, other = Seqs(exact, [60, 20], more=116), Seqs(exact, [76, 36], more=100)
    one.append(16)
    assert one.sets(90) == other.sets(90)
    for seqs in (one, other):
        seqs.truncate(0, 50)
        seqs.index.reorder([1, 0])
    query = one.query()
    assert torch.equal(one.index.select(query, 24).rows, other.index.select(query, 24).rows)


@pytest.mark.parametrize(
    ("options", "words"), [({"p": 0.0}, "p is 0.0"), ({"p": 1.1}, "p is 1.1"), ({"spare": 0}, "spare is 0")]
)
def test_settings_out_of_range_are_named(options: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Seqs(lambda shape: PrunedIndex(shape, index=ExactIndex, **{"p": 0.5, "spare": 2} | options), [20])
