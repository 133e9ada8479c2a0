"""arkvale as a method: what it is by default, options that reach the index, whole models."""

from __future__ import annotations

import pytest
from one_layer import OneLayer
from transformers import PreTrainedModel
from unit_methods import generate, indices

import kvthaw
from kvthaw.errors import ConfigError
from kvthaw.index.bounds import BoundIndex
from zoo import prompt


def test_options_reach_the_index(llama: PreTrainedModel) -> None:
    with kvthaw.attach(llama, "arkvale", budget=96, page=8, spread="max", choice="head", policy="mean_query") as handle:
        generate(llama, {"input_ids": prompt(1, 200)})
        for index in indices(handle):
            assert isinstance(index, BoundIndex)
            assert (index.size, index.spread, index.policy) == (8, "max", "mean_query")


def test_all_heads_of_a_layer_select_the_same_pages() -> None:
    """The authors' default; the first two pages and the last two are always there."""
    layer = OneLayer("arkvale", 400, 1, heads=3, group=2, budget=None, retrieved=64, page=16)
    rows = layer.step()
    assert rows[0] == rows[1] == rows[2]
    assert len(rows[0]) == 64
    assert min(rows[0]) >= 32
    own = OneLayer("arkvale", 400, 1, heads=3, group=2, budget=None, retrieved=64, page=16, choice="head").step()
    assert own[0] != own[1]


def test_settings_out_of_range_are_named(llama: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="spread is 'wide'"), kvthaw.attach(llama, "arkvale", budget=64, spread="wide"):
        generate(llama, {"input_ids": prompt(1, 90)}, 2)
    with pytest.raises(ConfigError, match="policy is 'mean_query'"):
        kvthaw.Cache(llama, "arkvale", policy="mean_query")
