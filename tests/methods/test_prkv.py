"""prkv as a method: what it is by default, options that reach the index, whole models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedModel
from unit_methods import budget_is_kept, full_budget_is_full_attention, generate, indices, rows_alone_are_the_rows_of_a_batch

import kvthaw
from kvthaw.cache.regions import Regions
from kvthaw.errors import ConfigError
from kvthaw.index.hybrid import HybridIndex
from kvthaw.methods import resolve
from zoo import prompt


def test_it_is_the_papers() -> None:
    method = resolve("prkv")
    assert (method.name, method.paper, method.unit) == ("prkv", "PRKV", "token + page")
    assert method.regions == Regions(0, 64, 32)


@pytest.mark.parametrize("options", [{}, {"interval": 16, "page": 8}, {"share": "auto", "page": 8}, {"share": 1.0}])
def test_a_budget_for_everything_gives_full_attention(llama: PreTrainedModel, options: dict[str, Any]) -> None:
    full_budget_is_full_attention(llama, "prkv", **options)


def test_the_budget_is_kept(llama: PreTrainedModel) -> None:
    budget_is_kept(llama, "prkv")


@pytest.mark.parametrize("policy", ["max", "mean", "mean_query"])
def test_rows_alone_are_the_rows_of_a_batch(llama: PreTrainedModel, policy: str) -> None:
    rows_alone_are_the_rows_of_a_batch(llama, "prkv", policy=policy)


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
            assert index.order is not None
            static = int(0.5 * handle.cache.frozen_layers[0].plan.rows)
            assert index.stops[0, :, 0].tolist() == [static] * 2
            assert not (index.order[0, :, :20] == old).all()


def test_a_window_of_another_size(llama: PreTrainedModel) -> None:
    with kvthaw.attach(llama, "prkv", budget=400, window=24, page=8) as handle:
        generate(llama, {"input_ids": prompt(1, 500)}, 2)
        assert handle.cache.frozen_layers[0].plan.regions == Regions(0, 24, 8)
        assert {index.window for index in indices(handle) if isinstance(index, HybridIndex)} == {24}
    with pytest.raises(ConfigError, match=r"regions\.window is 0"):
        resolve("prkv", window=0)


def test_no_static_set_is_arkvale(llama: PreTrainedModel) -> None:
    inputs = {"input_ids": prompt(2, 300)}
    with kvthaw.attach(llama, "prkv", retrieved=60, share=0.0):
        pages = generate(llama, inputs)
    method = replace(resolve("arkvale"), regions=resolve("prkv").regions)
    with kvthaw.attach(llama, method, retrieved=60):
        assert (generate(llama, inputs) == pages).all()


def test_settings_out_of_range_are_named(llama: PreTrainedModel) -> None:
    with kvthaw.attach(llama, "prkv", budget=64, share=2), pytest.raises(ConfigError, match="share is 2"):
        generate(llama, {"input_ids": prompt(1, 90)}, 2)
