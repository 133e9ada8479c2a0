"""socket as a method."""

from __future__ import annotations

from transformers import PreTrainedModel
from unit_methods import generate, indices

import kvthaw
from kvthaw_baselines.index.soft_hash import SoftHashIndex
from zoo import prompt


def test_options_reach_the_index(llama: PreTrainedModel) -> None:
    with kvthaw.attach(llama, "socket", budget=64, bits=8, tables=5, tau=0.5, policy="mean_query") as handle:
        generate(llama, {"input_ids": prompt(1, 200)}, 8)
        for index in indices(handle):
            assert isinstance(index, SoftHashIndex)
            assert (index.bits, index.count, index.tau, index.policy) == (8, 5, 0.5, "mean_query")
