"""MagicPIG against its paper's formulas: what is drawn, what it weighs, and that the estimate is unbiased."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from one_layer import SCALE, OneLayer

from kvthaw.cache.host import HostStore
from kvthaw.cache.index_api import IndexContext
from kvthaw.errors import ConfigError
from kvthaw.regions import Regions
from kvthaw_baselines.index.lsh import HashIndex


def chance(query: torch.Tensor, key: torch.Tensor, bits: int, tables: int) -> float:
    """w of equation 7: two hits or more, for an angle."""
    cosine = float(query @ key / (query.norm() * key.norm()))
    p = (1 - math.acos(max(-1.0, min(1.0, cosine))) / math.pi) ** bits
    return sum(math.comb(tables, n) * p**n * (1 - p) ** (tables - n) for n in range(2, tables + 1))


@pytest.mark.parametrize(("heads", "group", "bits", "tables"), [(2, 2, 10, 150), (1, 4, 7, 20), (3, 1, 2, 12)])
def test_the_draw_and_its_weights_are_the_papers(heads: int, group: int, bits: int, tables: int) -> None:
    layer = OneLayer("magicpig", 400, 8, heads=heads, group=group, budget=256, bits=bits, tables=tables)
    plan, owner = layer.layer.plan, layer.layer.retriever
    assert plan is not None
    assert owner is not None
    index = owner.index
    assert isinstance(index, HashIndex)
    sink, begin = plan.regions.sink, 400 - plan.regions.window
    keys = layer.keys[0].double()
    centred = keys - keys[:, sink:begin].mean(dim=1, keepdim=True)  # of the prompt, also for what comes later
    codes = (centred @ index.planes.directions.double() >= 0).unflatten(2, (tables, bits))
    thinned = 0
    for at in range(400, 408):
        if at - begin == plan.regions.ring:
            begin += plan.regions.buffer
        found = layer.step()
        assert layer.choice is not None
        weights = layer.choice.selection.log_weight
        assert weights is not None
        for head in range(heads):
            asked = layer.query[0, head * group : (head + 1) * group, at].double()
            code = (asked @ index.planes.directions[head].double() >= 0).unflatten(1, (tables, bits))
            meets = [{i for i in range(sink, begin) if int((codes[head, i] == one).all(dim=1).sum()) >= 2} for one in code]
            drawn = set().union(*meets)
            stays = min(1.0, plan.rows / max(1, len(drawn)))
            thinned += stays < 1
            assert found[head] <= drawn
            assert len(found[head]) == min(len(drawn), plan.rows)
            for place, row in enumerate(layer.choice.selection.rows[0, head].tolist()):
                for g in range(group if row >= 0 else 0):
                    weight = float(weights[0, head * group + g, place])
                    if row in meets[g]:
                        expected = -math.log(chance(asked[g], centred[head, row], bits, tables) * stays)
                        assert weight == pytest.approx(expected, abs=2e-3)
                    else:
                        assert weight == -math.inf
    assert (thinned > 0) == (bits < 5), "both kinds are tested"


@pytest.mark.parametrize("budget", [299, 60])
def test_the_estimate_of_the_softmax_sum_is_unbiased(budget: int) -> None:
    """Over many seeds, for each query head; thinned or not."""
    heads, group, dim, tokens = 1, 2, 8, 300
    keys, query = torch.randn(heads, tokens, dim) + 0.5, torch.randn(1, heads * group, dim)
    true = torch.exp(query[0].double() @ keys[0].double().T * SCALE).sum(dim=1)
    sums = []
    for seed in range(400):
        store, cpu = HostStore(1, heads, dim, torch.float32), torch.device("cpu")
        shape = IndexContext(0, heads * group, heads, dim, torch.float32, cpu, store, Regions(0, 8, 8), SCALE, seed=seed)
        index = HashIndex(shape, bits=3, tables=10)
        index.build(0, 0, keys, keys, query[0, :, None])
        selection = index.select(query, budget)
        rows = selection.rows[0, 0]
        assert selection.log_weight is not None
        logits = (query[0] @ keys[0, rows.clamp(min=0).long()].T * SCALE + selection.log_weight[0]).double()
        sums.append(torch.where(rows >= 0, torch.exp(logits), 0.0).sum(dim=1) / true)
    found = torch.stack(sums)
    error = found.std(dim=0) / len(sums) ** 0.5
    assert (error < 0.05).all(), "enough seeds to tell"
    assert ((found.mean(dim=0) - 1).abs() < 4 * error).all()


def test_one_choice_for_one_query_another_for_another() -> None:
    """What is thinned is not the same at every step."""
    layer = OneLayer("magicpig", 400, 2, heads=1, group=1, bits=1, tables=9, budget=128)
    first, second = layer.step()[0], layer.step()[0]
    assert len(first) == len(second) == layer.layer.plan.rows  # type: ignore[union-attr]
    assert len(first & second) < 0.8 * len(first)


@pytest.mark.parametrize("place", [50, 230])
def test_a_query_draws_the_key_it_looks_for_from_prompt_and_answer_alike(place: int) -> None:
    layer = OneLayer("magicpig", 200, 142, bits=8, tables=40, budget=256)
    for _ in range(140):
        layer.step()
    wanted = layer.keys[0, :, place].repeat_interleave(layer.group, dim=0)
    layer.query[0, :, 340], layer.query[0, :, 341] = 9 * wanted, -9 * wanted
    assert all(place in rows for rows in layer.step())
    assert not any(place in rows for rows in layer.step())


@pytest.mark.parametrize(("options", "message"), [({"bits": 16}, "bits is 16"), ({"tables": 1}, "tables is 1")])
def test_settings_out_of_range_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OneLayer("magicpig", 90, 1, **options)
