"""prkv as a method: what it is by default, options that reach the index, whole models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from one_layer import SCALE, OneLayer
from transformers import PreTrainedModel
from unit_methods import generate, indices

import kvthaw
from kvthaw.errors import ConfigError
from kvthaw.index.hybrid import HybridIndex
from kvthaw.methods import resolve
from kvthaw.regions import Regions
from zoo import prompt


def test_options_reach_the_index_and_the_static_set_is_refreshed(llama: PreTrainedModel) -> None:
    options = {"page": 8, "share": 0.5, "interval": 24, "spread": "max"}
    with kvthaw.attach(llama, "prkv", budget=160, **options) as handle:
        inputs = {"input_ids": prompt(1, 300)}
        generate(llama, inputs, 2)
        before = [index.order[0, :, :20].clone() for index in indices(handle) if isinstance(index, HybridIndex)]
        generate(llama, inputs, 120)
        for index, old in zip(indices(handle), before, strict=True):
            assert isinstance(index, HybridIndex)
            assert (index.size, index.interval, index.spread) == (8, 24, "max")
            static = int(0.5 * handle.cache.kv.offloaded[0].plan.rows)
            assert index.stops[0, :, 0].tolist() == [static] * 2
            assert not (index.order[0, :, :20] == old).all()


def test_a_window_of_another_size(llama: PreTrainedModel) -> None:
    with kvthaw.attach(llama, "prkv", budget=400, window=24, page=8) as handle:
        generate(llama, {"input_ids": prompt(1, 500)}, 2)
        assert handle.cache.kv.offloaded[0].plan.regions == Regions(0, 24, 8)
        assert {index.window for index in indices(handle) if isinstance(index, HybridIndex)} == {24}
    with pytest.raises(ConfigError, match=r"^window is 0; it must be at least 1"):
        resolve("prkv", window=0)


def test_no_static_set_is_arkvale(llama: PreTrainedModel) -> None:
    inputs = {"input_ids": prompt(2, 300)}
    with kvthaw.attach(llama, "prkv", retrieved=60, share=0.0):
        pages = generate(llama, inputs)
    method = replace(resolve("arkvale", choice="head"), regions=resolve("prkv").regions)
    with kvthaw.attach(llama, method, retrieved=60):
        assert (generate(llama, inputs) == pages).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 2}, "share is 2; it must be 'auto' or between 0 and 1"),
        ({"share": "some"}, "share is 'some'"),
        ({"interval": 0}, "interval is 0; it must be at least 1"),
        ({"page": 0}, "page is 0; it must be at least 1"),
        ({"spread": "wide"}, "spread is 'wide'"),
    ],
)
def test_settings_out_of_range_are_refused_at_once(llama: PreTrainedModel, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kvthaw.Cache(llama, "prkv", **options)


def test_every_step_sees_the_old_set_or_the_new_one() -> None:
    """Algorithm 1 in float64, beside every step: each choice is one set's, whole, static tokens and pages around them alike."""
    page, window, interval, steps = 4, 16, 12, 60
    layer = OneLayer("prkv", 150, steps, budget=72, page=page, window=window, interval=interval, share=0.5)
    plan = layer.layer.plan
    assert plan is not None
    count = plan.rows // 2

    def static(at: int, end: int) -> list[list[int]]:
        """Of each KV head, what the queries before token `at` attend to most among the first `end` keys."""
        found = []
        for head in range(layer.heads):
            own = slice(head * layer.group, (head + 1) * layer.group)
            asked = layer.query[0, own, at - window : at].double().flatten(0, 1)
            mass = torch.softmax(SCALE * asked @ layer.keys[0, head, :end].double().T, dim=1).mean(dim=0)
            found.append(mass.topk(count).indices.tolist())
        return found

    def choice(sets: list[list[int]], at: int, end: int) -> list[set[int]]:
        """What the query of token `at` selects with these static sets."""
        chosen = []
        for head, first in enumerate(sets):
            asked = layer.query[0, head * layer.group : (head + 1) * layer.group, at].double()
            rest = [i for i in range(end) if i not in set(first)]
            pages = [rest[i : i + page] for i in range(0, len(rest), page)]
            scores = []
            for members in pages:
                keys = layer.keys[0, head, members].double()
                centre = (keys.amax(dim=0) + keys.amin(dim=0)) / 2
                scores.append(SCALE * (asked @ centre + asked.abs() @ (keys - centre).abs().mean(dim=0)))
            joint = torch.stack(scores, dim=1)
            sizes = torch.tensor([len(members) for members in pages]).double().log()
            merged = (joint - torch.logsumexp(joint + sizes, dim=1, keepdim=True)).amax(dim=0)
            ranked = [i for unit in merged.argsort(descending=True).tolist() for i in pages[unit]]
            chosen.append(set((first + ranked)[: plan.rows]))
        return chosen

    group = layer.layer.retriever
    assert group is not None
    assert isinstance(group.index, HybridIndex)
    begin, since, changes = 150 - window, group.index.early, 0
    now, coming = static(150, begin), None
    for at in range(150, 150 + steps):
        if at - begin == window + page:  # the ring is full
            if coming is not None:
                now, coming, changes = coming, None, changes + 1
            begin, since = begin + page, since + page
            if since >= interval:
                coming, since = static(at, begin), 0
        found = layer.step()
        assert found == choice(now, at, begin)
        assert coming is None or found != choice(coming, at, begin)
    assert changes == 4
