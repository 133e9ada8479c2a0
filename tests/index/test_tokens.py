"""Tables with a place for every token, over the indexes that are made of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from seqs import FIRST, Seqs

from kvthaw.cache.index_api import Index, IndexContext
from kvthaw.counter_rng import mix
from kvthaw.index.exact import ExactIndex
from kvthaw.index.tokens import TokenIndex
from kvthaw_baselines.index.filters import FilterIndex
from kvthaw_baselines.index.lsh import HashIndex
from kvthaw_baselines.index.pq import ProductIndex

Make = Callable[[IndexContext], Index]
ALL: dict[str, Make] = {
    "exact": ExactIndex,
    "product": partial(ProductIndex, centroids=8),
    "filter": FilterIndex,
    "hash": partial(HashIndex, bits=2, tables=12),
}


@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_addresses_change_only_where_room_was_lacking(make: Make) -> None:
    seqs = Seqs(make, [150, 150])
    seqs.append(30)  # doubles
    index = seqs.index
    assert isinstance(index, TokenIndex)

    def addresses() -> list[int]:
        return [tensor.data_ptr() for tensor in index.tensors()]

    before = addresses()
    for _ in range(4):
        seqs.append(30)
        index.select(seqs.query(), 40)
    seqs.truncate(1, 60)
    assert addresses() == before
    assert index.tables.room["tokens"] == 300


def test_of_equal_scores_the_earlier_token() -> None:
    seqs = Seqs(ExactIndex, [90])
    index = seqs.index
    assert isinstance(index, ExactIndex)
    scores = torch.tensor([0.0, -2.5, -0.0, 1e-30, -torch.inf, 7.0, -2.5, 7.0]).expand(1, 2, -1)
    for budget, expected in (
        (2, [5, 7]),
        (3, [5, 7, 3]),
        (5, [5, 7, 3, 0, 2]),
        (6, [5, 7, 3, 0, 2, 1]),
        (9, [5, 7, 3, 0, 2, 1, 6]),
    ):
        found = index.best(scores, budget)
        assert found.rows[0, 1].tolist() == [FIRST + i for i in expected] + [-1] * (budget - len(expected))
        assert found.counts.tolist() == [[len(expected)] * 2]


def test_mix_is_one_to_one_and_even() -> None:
    found = mix(torch.arange(4096))
    assert len(set(found.tolist())) == 4096
    bits = (found[:, None] >> torch.arange(64)) & 1
    assert (bits.float().mean(dim=0) - 0.5).abs().max() < 0.05
