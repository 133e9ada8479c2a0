"""Prompts of a model that was loaded with FlashAttention 4."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvthaw
from kvthaw.engine.hf.attention import choose_flash_attention_4
from kvthaw.engine.hf.layer import FLASH_ATTENTION_4
from kvthaw.kernels import flash_attention_4
from zoo import build

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

    def logits(**how: Any) -> Tensor:
        cache = kvthaw.Cache(model, method, **settings, **how)
        found: Tensor = model(ids, past_key_values=cache).logits.float()
        return found

    with torch.no_grad():
        expected = logits()
        kvthaw.Cache(model, method, **settings)
        model.set_attn_implementation(FLASH_ATTENTION_4)
        met = counted(monkeypatch, "attend")
        for how in ({}, {"prefill_chunk": 64}):
            found = logits(**how)
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
    met: dict[str, list[int]] = {name: counted(monkeypatch, name) for name in ("attend", "packed")}
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
    assert met["packed"]
    alone = [served([ids])[0] for ids in prompts]
    assert met["attend"]
    assert alone == together
