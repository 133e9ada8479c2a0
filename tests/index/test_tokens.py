"""Tables with a place for every token, over the indexes that are made of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from lanes import FIRST, Lanes

from kvthaw.index.exact import ExactIndex
from kvthaw.index.filters import FilterIndex
from kvthaw.index.lsh import HashIndex
from kvthaw.index.mix import mix
from kvthaw.index.pq import ProductIndex
from kvthaw.index.tokens import TokenIndex
from kvthaw.types import Index, LayerShape
from shapes import DTYPES

Make = Callable[[LayerShape], Index]
RANKED: dict[str, Make] = {
    "exact": ExactIndex,
    "product": partial(ProductIndex, centroids=8),
    "filter": FilterIndex,
}
ALL: dict[str, Make] = RANKED | {"hash": partial(HashIndex, bits=2, tables=12)}
over_ranked = pytest.mark.parametrize("make", RANKED.values(), ids=RANKED)
over_all = pytest.mark.parametrize("make", ALL.values(), ids=ALL)


def rows(lanes: Lanes, budget: int, step: int = 100) -> list[list[set[int]]]:
    found = lanes.index.select(lanes.query(step), budget).rows
    return [[set(head.tolist()) - {-1} for head in lane] for lane in found]


@over_ranked
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "group", "dim"), [(4, 1, 64), (2, 4, 96), (1, 8, 80)])
def test_rows_are_valid_at_every_length(make: Make, heads: int, group: int, dim: int, dtype: torch.dtype) -> None:
    lanes = Lanes(make, [1, 63, 0, 150], heads=heads, group=group, dim=dim, dtype=dtype)
    for n in (1, 16, 7, 100):
        for budget in (33, 500, 1):
            lanes.select(budget)
        lanes.append(n)
    lanes.select(64)


@over_all
def test_a_lane_does_not_depend_on_the_others(make: Make) -> None:
    together, alone = Lanes(make, [150, 63, 0]), Lanes(make, [63], seeds=[1])
    for step, n in enumerate((16, 16, 300, 3)):
        assert rows(together, 50, 70 + step)[1] == rows(alone, 50, 70 + step)[0]
        together.append(n)
        alone.append(n)


@over_all
@pytest.mark.parametrize("length", [203, 130, 36, 5, 4])
def test_truncate_forgets_and_goes_on(make: Make, length: int) -> None:
    lanes = Lanes(make, [100, 100])
    for _ in range(10):
        lanes.append(10)
    lanes.truncate(0, length)
    assert all(FIRST <= row < length for head in rows(lanes, 500)[0] for row in head)
    lanes.append(10, [0])
    assert rows(lanes, 500)[0] == [set(range(FIRST, length + 10))] * 2


@over_all
def test_reorder_and_state(make: Make) -> None:
    lanes = Lanes(make, [150, 63, 0])
    other = Lanes(make, [0, 0, 0])
    other.index.load_state_dict(copy.deepcopy(lanes.index.state_dict()))
    other.keys, other.queries, other.length = lanes.keys, lanes.queries, list(lanes.length)
    for step, n in enumerate((10, 200, 10)):
        assert rows(other, 40, step) == rows(lanes, 40, step)
        lanes.append(n)
        other.append(n)
    before = rows(lanes, 40, 9)
    which = [1, 1, 0, 2]
    for name in ("keys", "length", "queries"):
        setattr(lanes, name, [getattr(lanes, name)[lane] for lane in which])
    lanes.index.reorder(which)
    assert rows(lanes, 40, 9) == [before[lane] for lane in which]


@over_all
def test_addresses_change_only_where_room_was_lacking(make: Make) -> None:
    lanes = Lanes(make, [150, 150])
    lanes.append(30)  # doubles
    index = lanes.index
    assert isinstance(index, TokenIndex)

    def addresses() -> list[int]:
        tensors = [*index.tables.values(), *index.learned.values(), index.known]
        return [tensor.data_ptr() for tensor in tensors]

    before = addresses()
    for _ in range(4):
        lanes.append(30)
        index.select(lanes.query(), 40)
    lanes.truncate(1, 60)
    assert addresses() == before
    assert index.capacity == 300


def test_of_equal_scores_the_earlier_token() -> None:
    lanes = Lanes(ExactIndex, [90])
    index = lanes.index
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


@pytest.mark.gpu
@over_all
def test_selecting_from_a_captured_graph(make: Make, device: torch.device) -> None:
    lanes = Lanes(make, [400, 90], device=device, dtype=torch.bfloat16)
    lanes.append(8)  # room
    query = lanes.query(0).clone()
    lanes.index.select(query, 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        selection = lanes.index.select(query, 64)
    for step in range(1, 12):
        query.copy_(lanes.query(step))
        selection.rows.fill_(-9)
        graph.replay()
        eager = lanes.index.select(query, 64)
        assert torch.equal(selection.rows, eager.rows)
        assert torch.equal(selection.counts, eager.counts)
        if eager.log_weight is not None:
            assert selection.log_weight is not None
            torch.testing.assert_close(selection.log_weight, eager.log_weight)
        lanes.append(8)
