"""freekv as a method."""

from __future__ import annotations

from transformers import PreTrainedModel
from unit_methods import budget_is_kept, full_budget_is_full_attention, generate, indices, rows_alone_are_the_rows_of_a_batch

import kvthaw
from kvthaw.index.lagged import LaggedIndex
from kvthaw.methods import resolve
from kvthaw.regions import Regions
from zoo import prompt


def test_it_is_the_papers() -> None:
    method = resolve("freekv")
    assert (method.name, method.paper, method.unit, method.regions) == ("freekv", "FreeKV", "page", Regions(512, 512, 32))


def test_a_budget_for_everything_gives_full_attention(llama: PreTrainedModel) -> None:
    full_budget_is_full_attention(llama, "freekv")


def test_the_budget_is_kept(llama: PreTrainedModel) -> None:
    budget_is_kept(llama, "freekv")


def test_rows_alone_are_the_rows_of_a_batch(llama: PreTrainedModel) -> None:
    rows_alone_are_the_rows_of_a_batch(llama, "freekv", tau=0.3)


def test_options_reach_the_index(llama: PreTrainedModel) -> None:
    with kvthaw.attach(llama, "freekv", budget=96, page=8, tau=0.5, spread="mean", policy="max") as handle:
        generate(llama, {"input_ids": prompt(1, 200)})
        for index in indices(handle):
            assert isinstance(index, LaggedIndex)
            assert (index.size, index.spread, index.policy, index.tau) == (8, "mean", "max", 0.5)
            assert int(index.asked.amax()) == 223, "one step a token, and the last token is not fed back"
