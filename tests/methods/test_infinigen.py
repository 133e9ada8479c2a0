"""infinigen as a method: its index, and the queries that it is asked with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from unit_methods import generate, indices

import kvthaw
from kvthaw.engine.hf.cache_argument import CACHE
from kvthaw_baselines.index.skewed import SkewedIndex
from zoo import build, prompt


def test_options_reach_the_index(llama: PreTrainedModel) -> None:
    with kvthaw.attach(llama, "infinigen", budget=64, ratio=0.5, alpha=2.0, most=0.1) as handle:
        generate(llama, {"input_ids": prompt(1, 200)}, 8)
        for index in indices(handle):
            assert isinstance(index, SkewedIndex)
            assert (index.width, index.alpha, index.most) == (8, 2.0, 0.1)


@pytest.fixture
def llama() -> PreTrainedModel:
    """Of three layers; the first two prefetch nothing."""
    return build("llama", num_hidden_layers=3)


class Asked:
    """What the indices of layers were asked with, by layer."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.queries: dict[int, list[Tensor]] = {}
        select = SkewedIndex.select

        def spy(index: SkewedIndex, query: Tensor, budget: int) -> Any:
            self.queries.setdefault(index.context.layer, []).append(query.clone())
            return select(index, query, budget)

        patch.setattr(SkewedIndex, "select", spy)


def test_a_layer_is_asked_with_what_the_layer_before_prefetches(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W_q of this layer on the attention input of the one before, turned to the token's position; layers 0 and 1 with their own."""
    asked, inputs = Asked(monkeypatch), dict[int, list[Tensor]]()
    turns: list[tuple[Tensor, Tensor]] = []
    hooks = []
    for i, layer in enumerate(llama.model.layers):

        def keep(module: Any, args: Any, kwargs: Any, i: int = i) -> None:
            if kwargs.get(CACHE) is not None and kwargs["hidden_states"].shape[1] == 1:
                inputs.setdefault(i, []).append(kwargs["hidden_states"])
                if i == 0:
                    turns.append(kwargs["position_embeddings"])

        hooks.append(layer.self_attn.register_forward_pre_hook(keep, with_kwargs=True))
    with kvthaw.attach(llama, "infinigen", budget=48):
        generate(llama, {"input_ids": prompt(2, 150)}, 6)
    for hook in hooks:
        hook.remove()
    for i, layer in enumerate(llama.model.layers):
        assert len(asked.queries[i]) == len(inputs[i]) == 5
        for step, query in enumerate(asked.queries[i]):
            made = layer.self_attn.q_proj(inputs[i - 1 if i > 1 else i][step]).unflatten(2, (4, 16)).transpose(1, 2)
            cos, sin = (x[:, None] for x in turns[step])
            expected = made * cos + torch.cat((-made[..., 8:], made[..., :8]), dim=3) * sin
            torch.testing.assert_close(query, expected[:, :, 0])


THREE: dict[str, Any] = {"num_hidden_layers": 3}


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        *(("llama", THREE), ("phi3", THREE), ("gpt_neox", THREE), ("gpt2", THREE | {"n_layer": 3})),
        *(("gemma3", {}), ("qwen3_next", {}), ("gpt_oss", {})),
    ],
)
def test_any_model_can_be_asked(name: str, layers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    model = build(name, **layers)
    for prefetch in (True, False):
        with kvthaw.attach(model, "infinigen", budget=48, prefetch=prefetch):
            generate(model, {"input_ids": prompt(1, 100)}, 2)
    first, *others = asked.queries
    if first == 0:  # of the model, which prefetches nothing
        second, *others = others
        assert torch.equal(*asked.queries[second])
    assert torch.equal(*asked.queries[first])
    assert others
    assert not any(torch.equal(*asked.queries[layer]) for layer in others)


def test_a_fork_prefetches_from_its_first_step(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(1, 120)
    asked = Asked(monkeypatch)
    base = kvthaw.Cache(llama, "full")
    llama(ids[:, :-1], past_key_values=base)
    for prefetch in (True, False):
        llama(ids[:, -1:], past_key_values=base.fork("infinigen", budget=48, prefetch=prefetch))
    assert torch.equal(*asked.queries[1])
    assert not torch.equal(*asked.queries[2])


def test_nothing_stays_on_the_model(llama: PreTrainedModel) -> None:
    with kvthaw.attach(llama, "infinigen", budget=48):
        generate(llama, {"input_ids": prompt(1, 100)}, 3)
        assert any(module._forward_pre_hooks for module in llama.model.modules())
    assert not any(module._forward_pre_hooks for module in llama.modules())
