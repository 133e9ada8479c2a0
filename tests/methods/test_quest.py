"""quest as a method: what it is by default, options that reach the index, whole models."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel
from unit_methods import generate, indices

import kvthaw
from kvthaw.errors import ConfigError
from kvthaw.index.bounds import BoundIndex
from kvthaw.methods import resolve
from zoo import prompt


def test_options_reach_the_index(llama: PreTrainedModel) -> None:
    with kvthaw.attach(llama, "quest", budget=96, page=8, policy="mean") as handle:
        generate(llama, {"input_ids": prompt(1, 200)})
        for index in indices(handle):
            assert isinstance(index, BoundIndex)
            assert (index.size, index.spread, index.policy) == (8, "max", "mean")


def test_settings_out_of_range_are_named(llama: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="page is 0"):
        resolve("quest", page=0)
    with pytest.raises(ConfigError, match="policy is 'all'"), kvthaw.attach(llama, "quest", budget=64, policy="all"):
        generate(llama, {"input_ids": prompt(1, 90)}, 2)


@pytest.mark.parametrize("method", ["quest", "prkv", "prkv-plus", "twilight", "infinigen", "twilight:base=prkv"])
def test_a_method_without_a_sink_takes_one(llama: PreTrainedModel, method: str) -> None:
    assert resolve(method).regions.sink == 0
    with kvthaw.attach(llama, f"{method}:sink=3", budget=64) as handle:
        generate(llama, {"input_ids": prompt(1, 150)}, 6)
        assert handle.stats().regions.sink == 3
        assert {index.context.regions.sink for index in indices(handle)} == {3}
