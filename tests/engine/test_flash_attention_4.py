"""Prompts of a model that was loaded with FlashAttention 4."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, PreTrainedModel, modeling_utils

import kvthaw
from kvthaw.engine import warm
from kvthaw.engine.hf import attention as hf_attention
from kvthaw.engine.hf.attention import choose_flash_attention_4
from kvthaw.engine.hf.layer import FLASH_ATTENTION_4, uses_flash_attention_4
from kvthaw.kernels import flash_attention_4
from kvthaw.kernels.dense import definition
from zoo import build, settings_of

IDS = torch.randint(0, 64, (2, 200), generator=torch.Generator().manual_seed(0))


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """Return a list that grows by the tokens of each query that a function attends with."""
    met, real = list[int](), getattr(flash_attention_4, name)

    def called(query: Tensor, *given: Any, **how: Any) -> Any:
        met.append(query.shape[2])
        return real(query, *given, **how)

    monkeypatch.setattr(flash_attention_4, name, called)
    return met


def test_a_cpu_has_no_kernels_of_it() -> None:
    """A model that asks for it attends by torch there."""
    model = build("llama")
    before = model.config._attn_implementation
    assert not choose_flash_attention_4(model)
    assert model.config._attn_implementation == before
    with torch.no_grad():
        expected = model(IDS).logits
        model.config._attn_implementation = FLASH_ATTENTION_4
        cache = kvthaw.Cache(model, "full")
        assert all(layer.flash4 for layer in cache.layers)
        torch.testing.assert_close(model(IDS, past_key_values=cache).logits, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["full", "pariskv-plus", "thaw"])
def test_gpu_prompts_attend_by_it(method: str, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """In one pass and in chunks: the logits equal torch's attention's, up to rounding."""
    pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    model, ids = build("llama", head_dim=64).to(device, torch.bfloat16), IDS.to(device)
    settings: dict[str, Any] = {} if method == "full" else {"budget": 64}

    def logits(chunk: int = IDS.shape[1]) -> Tensor:
        cache, found = kvthaw.Cache(model, method, **settings), list[Tensor]()
        with cache.prompt(ids.shape[1]):
            for part in ids.split(chunk, dim=1):
                found.append(model(part, past_key_values=cache).logits.float())
        return torch.cat(found, dim=1)

    with torch.no_grad():
        expected = logits()
        kvthaw.Cache(model, method, **settings)
        model.set_attn_implementation(FLASH_ATTENTION_4)
        met = counted(monkeypatch, "attend")
        for chunk in (200, 64):
            found = logits(chunk)
            assert met
            met.clear()
            assert float((found - expected).norm() / expected.norm()) < 0.03


@pytest.mark.gpu
def test_gpu_prompts_of_a_batch_attend_by_it(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Alone, captured, and several in one forward; each request gets the same tokens either way."""
    pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    model = build("llama", head_dim=64).to(device, torch.bfloat16)
    if not choose_flash_attention_4(model):
        pytest.skip("no kernels for this GPU")
    met = counted(monkeypatch, "attend")
    batch = kvthaw.Batch(model, "thaw", max_seqs=3, capacity=512, budget=64)

    def served(prompts: list[Tensor]) -> list[list[int]]:
        requests = [batch.join(ids, max_new_tokens=6, stop=()) for ids in prompts]
        if len(requests) > 1:
            batch.prefill_together(requests)
        else:
            batch.prefill(requests[0], requests[0].prompt)
        while batch.requests:
            batch.step()
        return [list(request.tokens) for request in requests]

    prompts = [IDS[0], IDS[1, :130], IDS[0, :70]]
    together = served(prompts)
    alone = [served([ids])[0] for ids in prompts]
    assert met
    assert alone == together


class Installed:
    """The package as if it were installed, with kernels for a CPU that compute the definition, or fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: Exception | None = None
        self.factor = 1.0
        self.accepted = True
        monkeypatch.setattr(hf_attention, "is_flash_attn_4_available", lambda: True)
        monkeypatch.setattr(flash_attention_4, "serves", lambda query, keys=1: True)
        monkeypatch.setattr(flash_attention_4, "attend", self.attend)
        monkeypatch.setattr(modeling_utils, "lazy_import_flash_attention", lambda *args, **kwargs: None)
        monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", self.can_dispatch)

    def attend(self, *given: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        if self.error is not None:
            raise self.error
        out, lse = definition(*given, **how)
        return out * self.factor, lse

    def can_dispatch(self, **kwargs: Any) -> bool:
        if not self.accepted:
            raise ValueError("the model refuses")
        return True


def test_it_is_chosen_where_it_works(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    Installed(monkeypatch)
    model = build("gemma2", attn_logit_softcapping=2.0)
    with caplog.at_level(logging.INFO, "kvthaw"):
        assert choose_flash_attention_4(model)
    assert "prompts attend by FlashAttention 4" in caplog.text
    assert model.config._attn_implementation == FLASH_ATTENTION_4


def test_it_is_chosen_for_the_text_alone_of_a_model_that_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part that sees may refuse it."""
    Installed(monkeypatch)
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32}
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=settings_of("gemma3"), vision_config=vision))
    before = model.config.vision_config._attn_implementation
    assert choose_flash_attention_4(model)
    assert model.config.text_config._attn_implementation == FLASH_ATTENTION_4
    assert model.config.vision_config._attn_implementation == before != FLASH_ATTENTION_4
    kvthaw.Cache(model, "full")
    assert uses_flash_attention_4(model)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"error": OSError("libnvrtc.so.13: cannot open shared object file")}, "libnvrtc"),
        ({"factor": 1.1}, "differs from the definition by 0.1"),
        ({"accepted": False}, "the model refuses"),
    ],
)
def test_where_it_fails_a_model_keeps_its_attention(
    change: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And the user reads why."""
    vars(Installed(monkeypatch)).update(change)
    model = build("llama")
    before = model.config._attn_implementation
    assert not choose_flash_attention_4(model)
    assert model.config._attn_implementation == before
    assert reason in caplog.text


def test_no_other_kernel_is_loaded_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers loads one of those that a model lists, from the Hub."""
    Installed(monkeypatch)
    model = build("llama")
    monkeypatch.setattr(type(model), "_compatible_flash_implementations", ["someone/kernel"], raising=False)
    monkeypatch.setattr(type(model), "set_attn_implementation", None)
    assert not choose_flash_attention_4(model)


def test_all_kernels_of_prompts_are_compiled_before_requests_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package compiles one for queries of one tile, 128 rows or more, and one for more: each takes three seconds."""
    Installed(monkeypatch)
    met = counted(monkeypatch, "attend")
    warm.compile_flash_attention_4(torch.zeros(1, 8, 16, 16), 2, 30.0)
    group = 4
    assert {tokens * group > 192 for tokens in met} == {False, True}
