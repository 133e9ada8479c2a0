"""What kvthaw does not serve is said in a sentence, and calls in which it was off tell so; masks of numbers are served."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

import kvthaw
from kvthaw import CacheError
from zoo import build, prompt

IDS = prompt(1, 90)
LOW = torch.finfo(torch.float32).min


def masks() -> dict[str, torch.Tensor]:
    """Masks of one meaning: the first 20 tokens see each other, as in a prefix LM."""
    seen = torch.ones(90, 90).tril().bool()
    seen[:20, :20] = True
    hidden = torch.zeros(1, 1, 90, 90).masked_fill
    return {"bool": seen[None, None]} | {str(low): hidden(~seen, low) for low in (LOW, -torch.inf, -1e4)}


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss"])
def test_masks_of_numbers_are_those_of_bools(architecture: str) -> None:
    model = build(architecture)
    expected = model(IDS, attention_mask=masks()[str(LOW)], use_cache=False).logits
    for attached in (True, False):
        handle = kvthaw.attach(model, "oracle", budget=200) if attached else None
        for mask in masks().values():
            for cached in (True, False):
                cache = kvthaw.Cache(model, "oracle", budget=200) if cached and not attached else None
                found = model(IDS, attention_mask=mask, use_cache=cached, past_key_values=cache).logits
                torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
        if handle is not None:
            handle.detach()
        kvthaw.detach(model)


@torch.no_grad()
def test_a_step_under_a_mask_of_numbers(llama: PreTrainedModel) -> None:
    with kvthaw.attach(llama, "oracle", budget=200):
        expected = llama(IDS[:, 60:61], past_key_values=llama(IDS[:, :60]).past_key_values).logits
        cache = llama(IDS[:, :60]).past_key_values
        found = llama(IDS[:, 60:61], past_key_values=cache, attention_mask=torch.zeros(1, 1, 1, 61)).logits
        assert torch.equal(found, expected)


@torch.no_grad()
@pytest.mark.parametrize("cached", [True, False])
def test_numbers_that_hide_nothing_are_refused_in_a_sentence(cached: bool) -> None:
    model, mask = build("gemma2"), torch.full((1, 1, 90, 90), -1.0)
    message = r"attention_mask is torch.float32.*0 and -inf"
    with kvthaw.attach(model, "oracle", budget=200), pytest.raises(CacheError, match=message):
        model(IDS, attention_mask=mask, use_cache=cached)


@torch.no_grad()
@pytest.mark.parametrize("by_config", [False, True])
def test_calls_without_a_cache_tell_that_kvthaw_was_off(by_config: bool) -> None:
    model = build("llama")
    expected = model.generate(IDS, max_new_tokens=4, do_sample=False)
    how: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    with kvthaw.attach(model, "oracle", budget=64) as handle:
        if by_config:
            model.config.use_cache = False
            model(IDS)
        else:
            assert torch.equal(model.generate(IDS, use_cache=False, **how), expected)
        assert "kvthaw was off" in handle.stats().reason
        assert "use_cache=False" in handle.stats().reason
        assert "use_cache=False" in str(handle.stats())
        assert handle.stats().tokens == 0
        assert "kvthaw was off" in repr(handle)
        model.config.use_cache = True
        model.generate(IDS, **how)
        assert "off" not in handle.stats().reason
        assert str(handle.stats()).count("93 tokens attended") == 1
        assert handle.stats().tokens == 93
        model.generate(IDS, use_cache=False, **how)
    assert "kvthaw was off" in handle.stats().reason


def test_gradient_checkpointing_tells_that_kvthaw_was_off(llama: PreTrainedModel) -> None:
    getattr(llama, "activation_checkpointing_enable", llama.gradient_checkpointing_enable)()  # its name since 5.23
    with kvthaw.attach(llama, "oracle", budget=64) as handle:
        llama.train()
        llama.requires_grad_(True)
        llama(IDS, labels=IDS).loss.backward()
        assert "gradient checkpointing" in handle.stats().reason
        llama.eval()
        with torch.no_grad():
            llama(IDS)
        assert "off" not in handle.stats().reason
    assert handle.stats().tokens == 90


@torch.no_grad()
def test_attention_weights_that_do_not_come_are_told_once(llama: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    with kvthaw.attach(llama, "oracle", budget=64), caplog.at_level(logging.WARNING, "kvthaw"):
        for _ in range(2):
            llama.generate(IDS, max_new_tokens=2, do_sample=False, output_attentions=True, return_dict_in_generate=True)
    assert [record.getMessage()[:22] for record in caplog.records] == ["output_attentions=True"]


@torch.no_grad()
def test_caches_that_are_not_served(llama: PreTrainedModel) -> None:
    tuned = DynamicCache(config=llama.config)
    llama(IDS[:, :10], past_key_values=tuned)
    with kvthaw.attach(llama, "oracle", budget=64):
        with pytest.raises(CacheError, match=r"holds 10 tokens.*PEFT's prefix tuning are not served: detach"):
            llama(IDS, past_key_values=tuned)
        with pytest.raises(CacheError, match=r"StaticCache.*no cache_implementation"):
            llama(IDS, past_key_values=StaticCache(config=llama.config, max_cache_len=100))
