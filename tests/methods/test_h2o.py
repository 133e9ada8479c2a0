"""H2O against its paper's rule, step by step; options; whole models."""

from __future__ import annotations

import pytest
import torch
from one_layer import OneLayer
from transformers import PreTrainedModel

import kvthaw
from zoo import prompt


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
    first = torch.zeros(heads, group, 260, dtype=torch.float64)
    for at in range(260):
        first[:, :, : at + 1] += layer.weights(at)
    scores[:, :260] = of_group(first, agree)
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


def test_a_prompt_in_parts_is_scored_by_all_its_queries() -> None:
    """Sums over the queries of all parts; means over those that could see a token, as kvpress takes them."""
    for score, seed in (("sum", 1), ("mean", 1), ("mean", 2), ("mean", 4)):
        torch.manual_seed(seed)
        layer = OneLayer("h2o", 100, 161, budget=64, score=score)
        layer.take(100, 260)
        total = torch.zeros(2, 2, 260, dtype=torch.float64)
        for at in range(260):
            total[:, :, : at + 1] += layer.weights(at)
        paid = total.mean(dim=1) / (1 if score == "sum" else torch.arange(260, 0, -1))
        plan = layer.layer.plan
        assert plan is not None
        begin = 260 - plan.regions.window
        recent = max(0, 32 - plan.regions.held)
        best = [sorted(range(begin), key=lambda i, own=own: (i < begin - recent, -float(own[i]))) for own in paid]
        assert layer.step() == [set(some[: plan.rows]) for some in best]


def test_a_fork_needs_the_queries_of_the_whole_prompt(llama: PreTrainedModel) -> None:
    ids = prompt(1, 150)
    base, every = kvthaw.Cache(llama, "full"), kvthaw.Cache(llama, "full:queries=None")
    for cache in (base, every):
        llama(ids[:, :-1], past_key_values=cache)
    with pytest.raises(kvthaw.CacheError, match=r"the queries of all 149 tokens.*has kept 128"):
        base.fork("h2o", budget=64)
    base.fork("h2o:queries=64", budget=64)
    own = kvthaw.Cache(llama, "h2o", budget=64)
    llama(ids[:, :-1], past_key_values=own)
    last = [llama(ids[:, -1:], past_key_values=cache).logits for cache in (own, every.fork("h2o", budget=64))]
    assert torch.equal(*last)


def test_half_of_the_budget_is_recent() -> None:
    layer = OneLayer("h2o", 400, 1, budget=256)
    rows = layer.step()
    for some in rows:
        assert len(some) == 256 - 48
        assert set(range(400 - 32 - (128 - 48), 400 - 32)) <= some
