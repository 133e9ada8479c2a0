"""Crops: of a cache whose index is not up to date, and those that a layer refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import kvthaw
from kvthaw.errors import CacheError
from zoo import build, prompt, ragged

IDS = prompt(1, 130)


def forward(model: PreTrainedModel, cache: DynamicCache, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        return model(ids, attention_mask=mask, past_key_values=cache).logits


@pytest.mark.parametrize("method", ["icecache-digest", "clusterkv", "pariskv", "snapkv"])
def test_to_the_sink_before_the_index_has_taken_a_second_prompt(llama: PreTrainedModel, method: str) -> None:
    cache, fresh = (kvthaw.Cache(llama, method, budget=340) for _ in range(2))
    forward(llama, cache, IDS[:, :102])
    forward(llama, cache, IDS[:, 102:])
    cache.crop(-125)
    forward(llama, fresh, IDS[:, :5])
    for t in range(30):
        ids = IDS[:, t : t + 1]
        torch.testing.assert_close(forward(llama, cache, ids), forward(llama, fresh, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", ["icecache-digest", "pariskv"])
def test_one_row_to_the_sink_and_another_not(llama: PreTrainedModel, method: str) -> None:
    batch = ragged([130, 70])
    ids, mask = batch["input_ids"], batch["attention_mask"]
    cache, plain = kvthaw.Cache(llama, method, budget=340), DynamicCache(config=llama.config)
    for one in (cache, plain):
        forward(llama, one, ids[:, :100], mask[:, :100])
        forward(llama, one, ids[:, 100:], mask)
        one.crop(-68)
    for t in range(40):
        whole = torch.cat((mask[:, :62], torch.ones(2, t + 1, dtype=torch.long)), dim=1)
        tokens = prompt(2, 40)[:, t : t + 1]
        close = forward(llama, cache, tokens, whole), forward(llama, plain, tokens, whole)
        torch.testing.assert_close(*close, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "kinds", "plain"),
    [
        ("gemma3", "sliding_attention", False),
        ("qwen3_next", "linear_attention", True),
    ],
)
def test_a_refused_crop_changes_no_layer(name: str, kinds: str, plain: bool) -> None:
    """Though layers that could be cropped come first; of a kvthaw cache and of generate()'s own."""
    model = build(name, layer_types=["full_attention", kinds] * 2)
    settings = {"budget": 32, "dense_layers": 1}
    with kvthaw.attach(model, "oracle", **settings) as handle:
        cache = DynamicCache(config=model.config) if plain else kvthaw.Cache(model, "oracle", **settings)
        forward(model, cache, IDS[:, :100])
        with pytest.raises(CacheError, match=r"dropped .*crop\(-60\)"):
            cache.crop(-60)
        assert [kv.length(0) for kv in handle.cache.kv.layers] == [100] * len(handle.cache.kv.layers)
        assert forward(model, cache, IDS[:, :1]).isfinite().all()


def test_keeping_all_tokens_changes_nothing_where_a_window_has_moved_on() -> None:
    model = build("gemma3", layer_types=["sliding_attention", "full_attention"] * 2)
    cache = kvthaw.Cache(model, "oracle", budget=32)
    forward(model, cache, IDS[:, :100])
    cache.keep(100)
    assert forward(model, cache, IDS[:, :1]).isfinite().all()
    with pytest.raises(CacheError, match=r"dropped .*crop\(-60\)"):
        cache.keep(41)


def test_a_positive_number_is_what_transformers_means(llama: PreTrainedModel) -> None:
    plain, cache = DynamicCache(config=llama.config), kvthaw.Cache(llama, "oracle", budget=64)
    with torch.no_grad():
        for each in (plain, cache):
            llama(prompt(1, 60), past_key_values=each)
    try:
        plain.crop(40)
    except ValueError:
        with pytest.raises(kvthaw.ConfigError, match=r"crop\(40\).*crop\(-40\) removes.*keep\(40\) keeps"):
            cache.crop(40)
    else:
        cache.crop(40)
    assert cache.get_seq_length() == plain.get_seq_length()


@pytest.mark.parametrize("method", ["oracle", "icecache-digest", "full"])
def test_keep(llama: PreTrainedModel, method: str) -> None:
    kept, cropped = (kvthaw.Cache(llama, method, budget=64) for _ in range(2))
    with torch.no_grad():
        for cache in (kept, cropped):
            llama(prompt(2, 60), past_key_values=cache)
        kept.keep(100)
        kept.keep(60)
        assert kept.get_seq_length() == 60
        kept.keep(41)
        cropped.crop(-19)
        found, expected = (llama(prompt(2, 1), past_key_values=cache).logits for cache in (kept, cropped))
        assert torch.equal(found, expected)
    kept.keep(0)
    assert kept.get_seq_length() == 0
    for length, message in ((-1, "at least 0"), (1.5, "a whole number")):
        with pytest.raises(kvthaw.ConfigError, match=rf"length is {length}; it must be {message}"):
            kept.keep(length)  # type: ignore[arg-type]
