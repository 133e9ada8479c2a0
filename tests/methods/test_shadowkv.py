"""shadowkv as a method."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel
from unit_methods import generate, indices

import kvthaw
from kvthaw.errors import UnsupportedModelError
from kvthaw_baselines.index.shadow import ShadowIndex
from zoo import build, prompt, ragged


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
        for kv in handle.cache.kv.offloaded:
            assert kv.retriever is not None
            index = kv.retriever.index
            assert isinstance(index, ShadowIndex)
            assert index.turned.all()
            tokens = int(index.known[0])
            made = index.keys(torch.arange(tokens).expand(1, kv.store.kv_heads, -1))
            given = kv.store.read(0, index.first, index.first + tokens)[None, :, :, 0]
            assert (made - given).norm() < 1e-3 * given.norm()


def test_models_that_turn_in_a_way_of_their_own_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="in a way that kvthaw cannot undo"):
        kvthaw.attach(build("llama4"), "shadowkv")


def test_a_model_without_rotary_positions_has_its_keys_as_they_are() -> None:
    model, batch = build("gpt2"), ragged([120, 37])
    expected = generate(model, batch)
    with kvthaw.attach(model, "shadowkv", budget=1024):
        assert torch.equal(generate(model, batch), expected)
