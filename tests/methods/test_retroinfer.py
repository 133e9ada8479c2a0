"""retroinfer as a method."""

from __future__ import annotations

from transformers import PreTrainedModel
from unit_methods import generate, indices

import kvthaw
from kvthaw_baselines.index.wave import WaveIndex
from zoo import prompt


def test_options_reach_the_index(llama: PreTrainedModel) -> None:
    options = {"segment": 64, "tokens_per_cluster": 8, "batch": 16, "estimated": 0.5, "policy": "max"}
    with kvthaw.attach(llama, "retroinfer", budget=64, **options) as handle:
        generate(llama, {"input_ids": prompt(1, 200)})
        for index in indices(handle):
            assert isinstance(index, WaveIndex)
            assert {name: getattr(index, name) for name in options} == options
