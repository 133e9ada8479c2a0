"""Modules with kernels compute what they compute without, in every architecture, and are left as they were."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

import kvthaw
from kvthaw.engine.hf import fused
from kvthaw.kernels import gated, rms_norm, rotate
from zoo import MODELS, build, prompt

KINDS = {"llama": {"_norm": 5, "_mlp": 2, "forward": 2}, "gemma3": {"_mlp": 0, "_norm": 0}, "gpt2": {}}
"""Modules of some models that have kernels, by their forward."""


def modules(model: PreTrainedModel) -> list[tuple[Module, Callable[..., Any]]]:
    return [(module, forward) for ref, forward in fused.find(model) if (module := ref()) is not None]


def logits(model: PreTrainedModel) -> Tensor:
    out: Tensor = model(prompt(1, 30).to(model.device)).logits
    return out


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in KINDS else pytest.mark.slow) for name in MODELS])
def test_definitions_give_the_same_logits(name: str) -> None:
    model = build(name)
    plain, found = logits(model), modules(model)
    with fused.swapped(found):
        assert torch.equal(logits(model), plain)
    assert not any("forward" in vars(module) for module in model.modules())
    for forward, count in KINDS.get(name, {}).items():
        assert sum(one.__name__ == forward for _, one in found) == count


def test_kernels_give_the_logits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    launched = list[str]()

    def noted(name: str, launch: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (launched.append(name), launch(*args))[1]

    model = build("qwen3").to(device)
    plain = logits(model)
    for name, kernel in (("rms_norm", rms_norm), ("gated", gated), ("rotate", rotate)):
        monkeypatch.setattr(fused, name, noted(name, kernel.launch))
    with fused.swapped(modules(model)):
        assert torch.allclose(logits(model), plain, rtol=1e-4, atol=1e-4)
    assert [launched.count(name) for name in ("rms_norm", "gated", "rotate")] == [9, 2, 2]


def test_what_has_a_forward_of_its_own_keeps_it() -> None:
    model = build("llama")
    norm = model.model.norm
    norm.forward = own = torch.zeros_like
    with fused.swapped(modules(model)):
        assert vars(norm)["forward"] is own
    assert vars(norm)["forward"] is own


def test_gradients_go_through_the_modules_own_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama").requires_grad_()
    for name in ("rms_norm", "gated", "rotate"):
        monkeypatch.setattr(fused, name, None)
    with fused.swapped(modules(model)):
        logits(model).sum().backward()
    assert model.model.norm.weight.grad is not None


def test_other_activations_are_left_alone() -> None:
    assert not [one for _, one in modules(build("llama", hidden_act="gelu")) if one is fused._mlp]


def test_a_batch_and_an_attached_model_compute_within(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU; here as if the model were on one."""
    monkeypatch.setattr(fused, "_on_gpu", lambda model: True)
    model, seen = build("llama"), set[int]()
    model.model.norm.register_forward_hook(lambda module, given, out: seen.add("forward" in vars(module)))
    ids = prompt(1, 30)
    batch = kvthaw.Batch(model, "full", max_seqs=1, capacity=64)
    request = batch.join(ids[0], max_new_tokens=4, stop=())
    while not request.finished:
        batch.step()
    assert seen == {True}
    with kvthaw.attach(model, "full"):
        model.generate(ids, max_new_tokens=3, do_sample=False)
        copied = copy.deepcopy(model)
    assert seen == {True}
    assert "forward" not in vars(copied.model.norm)
    logits(model)
    assert seen == {True, False}
