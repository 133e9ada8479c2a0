"""H2O against its paper's rule, step by step; options; whole models."""

from __future__ import annotations

import pytest
import torch
from one_layer import OneLayer


def of_group(weights: torch.Tensor, agree: str) -> torch.Tensor:
    return weights.mean(dim=1) if agree == "mean" else weights.amax(dim=1)


@pytest.mark.parametrize("agree", ["mean", "max"])
@pytest.mark.parametrize(("heads", "group", "budget"), [(2, 2, 64), (3, 1, 150), (1, 4, 40)])
def test_heavy_hitters_are_the_papers(agree: str, heads: int, group: int, budget: int) -> None:
    """Algorithm 1: scores add up over the steps; of the tokens that are not recent the one of least score goes."""
    layer = OneLayer("h2o", 260, 90, heads=heads, group=group, budget=budget, agree=agree)
    plan = layer.layer.plan
    assert plan is not None
    regions, recent = plan.regions, max(0, budget // 2 - plan.regions.held)
    scores = torch.zeros(heads, 350, dtype=torch.float64)
    prompt = torch.zeros(heads, group, 260, dtype=torch.float64)
    for at in range(196, 260):  # the prompt's last 64 queries
        prompt[:, :, : at + 1] += layer.weights(at)
    scores[:, :260] = of_group(prompt, agree)
    begin = 260 - regions.window

    def keep(some: set[int], head: int) -> set[int]:
        best = sorted(some, key=lambda i: (i < begin - recent, -float(scores[head, i]), i))
        return set(best[: plan.rows])

    kept = [keep(set(range(begin)), head) for head in range(heads)]
    for at in range(260, 350):
        if at - begin == regions.ring:
            leaving = set(range(begin, begin + regions.buffer))
            begin += regions.buffer
            kept = [keep(kept[head] | leaving, head) for head in range(heads)]
        assert layer.step() == kept
        visible = [some | set(range(begin, at + 1)) for some in kept]
        scores[:, : at + 1] += of_group(layer.weights(at, visible), agree)
    for head in range(heads):
        assert set(range(begin - recent, begin)) <= kept[head]


def test_half_of_the_budget_is_recent() -> None:
    layer = OneLayer("h2o", 400, 1, budget=256)
    rows = layer.step()
    for some in rows:
        assert len(some) == 256 - 48
        assert set(range(400 - 32 - (128 - 48), 400 - 32)) <= some
