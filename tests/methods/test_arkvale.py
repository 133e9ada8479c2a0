"""arkvale as a method: what it is by default, options that reach the index, whole models."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel
from unit_methods import generate, indices

import kvthaw
from kvthaw.errors import ConfigError
from kvthaw.index.bounds import BoundIndex
from zoo import prompt


def test_options_reach_the_index(llama: PreTrainedModel) -> None:
    with kvthaw.attach(llama, "arkvale", budget=96, page=8, spread="max", policy="mean_query") as handle:
        generate(llama, {"input_ids": prompt(1, 200)})
        for index in indices(handle):
            assert isinstance(index, BoundIndex)
            assert (index.size, index.spread, index.policy) == (8, "max", "mean_query")


def test_settings_out_of_range_are_named(llama: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="spread is 'wide'"), kvthaw.attach(llama, "arkvale", budget=64, spread="wide"):
        generate(llama, {"input_ids": prompt(1, 90)}, 2)
