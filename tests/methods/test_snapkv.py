"""SnapKV against its paper's formula, once after the prompt and refreshed; options; whole models."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from one_layer import OneLayer

from kvthaw.errors import ConfigError
from kvthaw.methods import resolve


def chosen(
    layer: OneLayer, tokens: int, end: int, width: int, rows: int, *, kernel: int, pooling: str, agree: str
) -> list[set[int]]:
    """SnapKV, listing 1: attention of the `width` queries before `end` to the first `tokens` tokens, summed, pooled, the top."""
    found = []
    votes = torch.stack([torch.nn.functional.pad(layer.weights(at), (0, end - 1 - at)) for at in range(end - width, end)])
    for head in range(layer.heads):
        of_group = votes[:, head].sum(dim=0)
        merged = (of_group.mean(dim=0) if agree == "mean" else of_group.amax(dim=0))[:tokens].tolist()
        pooled, half = [], kernel // 2
        for i in range(tokens):
            near = merged[max(0, i - half) : i + half + 1]
            pooled.append(sum(near) / kernel if pooling == "avg" else max(near))
        best = sorted(range(tokens), key=lambda i, pooled=pooled: (-pooled[i], i))  # type: ignore[misc]
        found.append(set(best[:rows]))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"kernel": 5, "pooling": "avg", "agree": "mean"},
        {"kernel": 7, "pooling": "max", "agree": "mean"},
        {"kernel": 1, "pooling": "avg", "agree": "max"},
    ],
    ids=str,
)
@pytest.mark.parametrize(("heads", "group", "budget"), [(2, 2, 64), (3, 1, 128), (1, 4, 200)])
def test_the_choice_is_the_papers(options: dict[str, Any], heads: int, group: int, budget: int) -> None:
    layer = OneLayer("snapkv", 300, 60, heads=heads, group=group, budget=budget, dtype=torch.float64, **options)
    plan = layer.layer.plan
    assert plan is not None
    window = plan.regions.window
    expected = chosen(layer, 300 - window, 300, min(32, window), plan.rows, **options)
    for _ in range(60):
        assert layer.step() == expected, "what leaves the ring is evicted while the prompt's rows fill the budget"


def test_what_is_generated_stays_while_there_is_room() -> None:
    layer = OneLayer("snapkv", 50, 60, budget=128)
    rows = [layer.step()[0] for _ in range(60)]
    assert layer.layer.plan is not None
    assert rows[0] == set(range(50 - layer.layer.plan.regions.window))
    for before, after in itertools.pairwise(rows):
        assert before <= after, "once kept, always kept"
    assert len(rows[-1]) > len(rows[0])


def test_refreshed_it_chooses_anew_from_all_tokens() -> None:
    layer = OneLayer("snapkv:refresh=24", 200, 90)
    plan = layer.layer.plan
    assert plan is not None
    window, ring = plan.regions.window, plan.regions.ring
    expected = chosen(layer, 200 - window, 200, window, plan.rows, kernel=7, pooling="avg", agree="mean")
    begin, since, fresh = 200 - window, 0, 0
    for at in range(200, 290):
        if at - begin == ring:
            begin, since = begin + plan.regions.buffer, since + plan.regions.buffer
            if since >= 24:
                expected = chosen(layer, begin, at, window, plan.rows, kernel=7, pooling="avg", agree="mean")
                since, fresh = 0, fresh + 1
        assert layer.step() == expected
    assert fresh == 3


def test_a_long_continuation_is_a_new_prompt() -> None:
    """Also tokens that were evicted may be chosen by its queries."""
    layer = OneLayer("snapkv", 200, 101)
    before = layer.step()
    layer.take(201, 300)
    plan = layer.layer.plan
    assert plan is not None
    window = plan.regions.window
    expected = chosen(layer, 300 - window, 300, window, plan.rows, kernel=7, pooling="avg", agree="mean")
    assert layer.step() == expected != before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": 4}, "kernel is 4; it must be odd"),
        ({"width": 0}, "width is 0"),
        ({"pooling": "sum"}, "pooling is 'sum'"),
        ({"agree": "all"}, "agree is 'all'"),
    ],
)
def test_settings_out_of_range_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OneLayer("snapkv", 90, 1, **options)
    with pytest.raises(ConfigError, match="refresh is 0"):
        resolve("snapkv", refresh=0)
