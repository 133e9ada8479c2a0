"""PQCache against its paper's formulas; options; whole models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from one_layer import SCALE, OneLayer
from torch import Tensor
from transformers import PreTrainedModel
from unit_methods import generate, indices

import kvthaw
from kvthaw.errors import ConfigError
from kvthaw.index.draws import drawn
from kvthaw_baselines.index.pq import ProductIndex
from zoo import prompt


def lloyd(points: Tensor, start: Tensor, iterations: int) -> Tensor:
    """k-means by hand, [C, s] float64."""
    centroids, before = points[start].clone(), None
    for _ in range(iterations):
        nearest = codes(points, centroids)
        if before is not None and torch.equal(nearest, before):
            break
        before = nearest
        for c in nearest.unique().tolist():
            centroids[c] = points[nearest == c].mean(dim=0)
    return centroids


def codes(points: Tensor, centroids: Tensor) -> Tensor:
    """The nearest centroid of each point."""
    return ((points[:, None] - centroids) ** 2).sum(dim=2).argmin(dim=1)


@pytest.mark.parametrize(("heads", "group", "parts", "centroids"), [(2, 2, 2, 16), (1, 4, 4, 8), (3, 1, 1, 64), (1, 1, 1, 200)])
def test_the_choice_is_the_papers(heads: int, group: int, parts: int, centroids: int) -> None:
    options = {"parts": parts, "centroids": centroids, "iterations": 6}
    layer = OneLayer("pqcache", 160, 40, heads=heads, group=group, budget=64, **options)
    plan = layer.layer.plan
    assert plan is not None
    sink, begin = plan.regions.sink, 160 - plan.regions.window
    positions = torch.arange(sink, begin)
    starts = drawn(positions, min(centroids, len(positions)), 2 * 65_537 + torch.arange(heads * parts)[:, None])
    split = layer.keys[0].double().unflatten(2, (parts, -1))  # [H, T, parts, s]
    books = [
        [lloyd(split[head, sink:begin, part], starts[head * parts + part], 6) for part in range(parts)] for head in range(heads)
    ]
    for at in range(160, 200):
        if at - begin == plan.regions.ring:
            begin += plan.regions.buffer
        found = layer.step()
        asked = layer.query[0, :, at].double().view(heads, group, parts, -1)
        for head in range(heads):
            scores = torch.zeros(group, begin - sink, dtype=torch.float64)
            for part, book in enumerate(books[head]):  # frozen, for generated keys too
                scores += asked[head, :, part] @ book[codes(split[head, sink:begin, part], book)].T
            weights = torch.softmax(scores * SCALE, dim=1).amax(dim=0).tolist()
            ranked = sorted(range(len(weights)), key=lambda i, weights=weights: (-weights[i], i))  # type: ignore[misc]
            assert len(found[head]) == plan.rows
            least = weights[ranked[plan.rows - 1]]
            assert all(weights[row - sink] >= least * (1 - 1e-5) for row in found[head]), "ties may go either way"


def test_tokens_of_one_code_come_in_the_order_of_the_text() -> None:
    """Equal scores are common, and the choice must not depend on who else is in the batch."""
    layer = OneLayer("pqcache", 120, 4, heads=1, group=1, budget=64, parts=1, centroids=1)
    plan = layer.layer.plan
    assert plan is not None
    assert layer.step() == [set(range(plan.regions.sink, plan.regions.sink + plan.rows))]


def test_options_reach_the_index(llama: PreTrainedModel) -> None:
    with kvthaw.attach(llama, "pqcache", budget=96, parts=4, centroids=16) as handle:
        generate(llama, {"input_ids": prompt(1, 200)}, 4)
        for index in indices(handle):
            assert isinstance(index, ProductIndex)
            assert index.tables["centroids"].shape[2:4] == (4, 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parts": 3}, "parts is 3; it must be at least 1 and divide head_dim, 16"),
        ({"centroids": 257}, "centroids is 257"),
        ({"iterations": 0}, "iterations is 0"),
        ({"policy": "all"}, "policy is 'all'"),
    ],
)
def test_settings_out_of_range_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OneLayer("pqcache", 90, 1, **options)
