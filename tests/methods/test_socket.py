"""socket as a method."""

from __future__ import annotations

from transformers import PreTrainedModel
from unit_methods import budget_is_kept, full_budget_is_full_attention, generate, indices, rows_alone_are_the_rows_of_a_batch

import kvthaw
from kvthaw.index.soft_hash import SoftHashIndex
from kvthaw.methods import resolve
from kvthaw.regions import Regions
from zoo import prompt


def test_it_is_the_papers() -> None:
    method = resolve("socket")
    assert (method.name, method.paper, method.unit, method.regions) == ("socket", "SOCKET", "token", Regions(128, 128, 16))


def test_a_budget_for_everything_gives_full_attention(llama: PreTrainedModel) -> None:
    full_budget_is_full_attention(llama, "socket")


def test_the_budget_is_kept(llama: PreTrainedModel) -> None:
    budget_is_kept(llama, "socket", bits=6, tables=8)


def test_rows_alone_are_the_rows_of_a_batch(llama: PreTrainedModel) -> None:
    rows_alone_are_the_rows_of_a_batch(llama, "socket", policy="mean")


def test_options_reach_the_index(llama: PreTrainedModel) -> None:
    with kvthaw.attach(llama, "socket", budget=64, bits=8, tables=5, tau=0.5, policy="mean_query") as handle:
        generate(llama, {"input_ids": prompt(1, 200)}, 8)
        for index in indices(handle):
            assert isinstance(index, SoftHashIndex)
            assert (index.bits, index.count, index.tau, index.policy) == (8, 5, 0.5, "mean_query")
