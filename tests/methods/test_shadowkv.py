"""shadowkv as a method."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel
from unit_methods import budget_is_kept, full_budget_is_full_attention, generate, indices, rows_alone_are_the_rows_of_a_batch

import kvthaw
from kvthaw.errors import UnsupportedModelError
from kvthaw.index.shadow import ShadowIndex
from kvthaw.methods import resolve
from kvthaw.regions import Regions
from zoo import build, prompt


def test_it_is_the_papers() -> None:
    method = resolve("shadowkv")
    assert (method.name, method.paper, method.unit) == ("shadowkv", "ShadowKV", "page")
    assert method.regions == Regions(0, 32, 8)


@pytest.mark.parametrize("rank", [8, 160])
def test_a_budget_for_everything_gives_full_attention(llama: PreTrainedModel, rank: int) -> None:
    full_budget_is_full_attention(llama, "shadowkv", rank=rank)


def test_the_budget_is_kept(llama: PreTrainedModel) -> None:
    budget_is_kept(llama, "shadowkv")


def test_rows_alone_are_the_rows_of_a_batch(llama: PreTrainedModel) -> None:
    rows_alone_are_the_rows_of_a_batch(llama, "shadowkv", rank=20)


def test_options_reach_the_index(llama: PreTrainedModel) -> None:
    with kvthaw.attach(llama, "shadowkv", budget=96, chunk=4, rank=7, outliers=2, policy="mean") as handle:
        generate(llama, {"input_ids": prompt(1, 200)})
        for index in indices(handle):
            assert isinstance(index, ShadowIndex)
            assert (index.size, index.rank, index.outliers, index.policy) == (4, 7, 2, "mean")


@pytest.mark.parametrize("name", ["llama", "qwen3", "glm4", "gemma3", "gpt_oss", "gpt_neox", "stablelm", "phi3"])
def test_keys_are_turned_back_to_what_the_model_made(name: str) -> None:
    """Every token has the same embedding, so but for their turns all keys are the same, and rank 1 is all there is."""
    model = build(name)
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table.copy_(table[:1].expand_as(table))
        for parameter, value in model.named_parameters():
            if parameter.endswith("sinks"):  # which would tell early tokens from later ones
                value.fill_(-1e4)
    with kvthaw.attach(model, "shadowkv", budget=64, rank=1) as handle:
        generate(model, {"input_ids": prompt(1, 150)}, 4)
        for kv in handle.cache.frozen_layers:
            assert kv.group is not None
            index = kv.group.index
            assert isinstance(index, ShadowIndex)
            assert index.turned.all()
            tokens = int(index.known[0])
            made = index.keys(torch.arange(tokens).expand(1, kv.store.kv_heads, -1))
            given = kv.store.read(0, index.first, index.first + tokens)[None, :, :, 0]
            assert (made - given).norm() < 1e-3 * given.norm()


def test_models_that_turn_in_a_way_of_their_own_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="turns its keys in a way of its own"):
        kvthaw.attach(build("llama4"), "shadowkv")


def test_a_model_without_rotary_positions_has_its_keys_as_they_are() -> None:
    full_budget_is_full_attention(build("gpt2"), "shadowkv")
