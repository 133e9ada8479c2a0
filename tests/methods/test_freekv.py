"""freekv as a method."""

from __future__ import annotations

from transformers import PreTrainedModel
from unit_methods import generate, indices

import kvthaw
from kvthaw_baselines.index.lagged import LaggedIndex
from zoo import prompt


def test_options_reach_the_index(llama: PreTrainedModel) -> None:
    with kvthaw.attach(llama, "freekv", budget=96, page=8, tau=0.5, spread="mean", policy="max") as handle:
        generate(llama, {"input_ids": prompt(1, 200)})
        for index in indices(handle):
            assert isinstance(index, LaggedIndex)
            assert (index.size, index.spread, index.policy, index.tau) == (8, "mean", "max", 0.5)
            assert int(index.asked.amax()) - 1 == 223, "one step a token, and the last token is not fed back"
