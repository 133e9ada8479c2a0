"""A forward takes its cache by transformers' name for it, the old or the new."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import kvthaw
from kvthaw.engine.hf.cache_argument import CACHE, pop_cache
from zoo import prompt


@pytest.mark.parametrize("name", sorted({"past_key_values", CACHE}))
def test_an_attached_model_takes_a_cache_by_either_name(llama: PreTrainedModel, name: str) -> None:
    ids, cache = prompt(1, 40), DynamicCache(config=llama.config)
    with kvthaw.attach(llama, "oracle", budget=32) as handle, torch.no_grad():
        out = llama(ids, **{name: cache})
        llama(ids[:, :1], **{name: cache})
    assert out[CACHE] is cache
    assert handle.stats().tokens == 41


def test_the_new_name_wins() -> None:
    given = {"past_key_values": None, CACHE: "new", "use_cache": True}
    assert pop_cache(given) == "new"
    assert given == {"use_cache": True}
