"""retroinfer as a method."""

from __future__ import annotations

from transformers import PreTrainedModel
from unit_methods import budget_is_kept, full_budget_is_full_attention, generate, indices, rows_alone_are_the_rows_of_a_batch

import kvthaw
from kvthaw.index.wave import WaveIndex
from kvthaw.methods import resolve
from kvthaw.regions import Regions
from zoo import prompt


def test_it_is_the_papers() -> None:
    method = resolve("retroinfer")
    assert (method.name, method.paper, method.unit) == ("retroinfer", "RetroInfer", "cluster")
    assert method.regions == Regions(4, 64, 16)


def test_a_budget_for_everything_gives_full_attention(llama: PreTrainedModel) -> None:
    full_budget_is_full_attention(llama, "retroinfer")


def test_the_budget_is_kept(llama: PreTrainedModel) -> None:
    budget_is_kept(llama, "retroinfer")


def test_rows_alone_are_the_rows_of_a_batch(llama: PreTrainedModel) -> None:
    rows_alone_are_the_rows_of_a_batch(llama, "retroinfer", segment=64)


def test_options_reach_the_index(llama: PreTrainedModel) -> None:
    options = {"segment": 64, "tokens_per_cluster": 8, "batch": 16, "estimated": 0.5, "policy": "max"}
    with kvthaw.attach(llama, "retroinfer", budget=64, **options) as handle:
        generate(llama, {"input_ids": prompt(1, 200)})
        for index in indices(handle):
            assert isinstance(index, WaveIndex)
            assert {name: getattr(index, name) for name in options} == options
