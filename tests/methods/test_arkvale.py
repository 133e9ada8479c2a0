"""arkvale as a method: what it is by default, options that reach the index, whole models."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from transformers import PreTrainedModel
from unit_methods import budget_is_kept, full_budget_is_full_attention, generate, indices, rows_alone_are_the_rows_of_a_batch

import kvthaw
from kvthaw.errors import ConfigError
from kvthaw.index.bounds import BoundIndex
from kvthaw.methods import resolve
from kvthaw.regions import Regions
from zoo import prompt


def test_it_is_the_papers() -> None:
    method = resolve("arkvale")
    assert (method.name, method.paper, method.unit) == ("arkvale", "ArkVale", "page")
    assert (method.regions, method.keep) == (Regions(32, 64, 32), 1)
    assert isinstance(method.index, partial)
    assert method.index.keywords == {"page": 32, "spread": "mean", "policy": "max"}


@pytest.mark.parametrize("options", [{}, {"page": 8, "spread": "max"}])
def test_a_budget_for_everything_gives_full_attention(llama: PreTrainedModel, options: dict[str, Any]) -> None:
    full_budget_is_full_attention(llama, "arkvale", **options)


def test_the_budget_is_kept(llama: PreTrainedModel) -> None:
    budget_is_kept(llama, "arkvale")


@pytest.mark.parametrize("policy", ["max", "mean", "mean_query"])
def test_rows_alone_are_the_rows_of_a_batch(llama: PreTrainedModel, policy: str) -> None:
    rows_alone_are_the_rows_of_a_batch(llama, "arkvale", policy=policy)


def test_options_reach_the_index(llama: PreTrainedModel) -> None:
    with kvthaw.attach(llama, "arkvale", budget=96, page=8, spread="max", policy="mean_query") as handle:
        generate(llama, {"input_ids": prompt(1, 200)})
        for index in indices(handle):
            assert isinstance(index, BoundIndex)
            assert (index.size, index.spread, index.policy) == (8, "max", "mean_query")


def test_settings_out_of_range_are_named(llama: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="spread is 'wide'"), kvthaw.attach(llama, "arkvale", budget=64, spread="wide"):
        generate(llama, {"input_ids": prompt(1, 90)}, 2)
