"""What handles, caches and their numbers say of themselves."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

import kvthaw
from zoo import prompt

IDS = prompt(1, 60)


def test_stats_are_a_sentence(llama: PreTrainedModel) -> None:
    with kvthaw.attach(llama, "oracle", budget=32) as handle:
        llama.generate(IDS, max_new_tokens=9, do_sample=False)
        said = str(handle.stats())
    assert said.startswith("oracle: ")
    assert " of 68 tokens attended per step; the budget leaves sink 2 of 4, window 8 of 32, buffer 4 of 16 tokens; KV " in said
    assert said.endswith(" % of the selected rows were on the device already")
    assert str(handle.stats()) == said
    with kvthaw.attach(llama, "full") as handle:
        llama.generate(IDS, max_new_tokens=9, do_sample=False)
        said = str(handle.stats())
        assert said.startswith("full: all 68 tokens attended per step; KV ")
        assert said.endswith(" on the device"), "nothing is said of what full attention has not"
    with kvthaw.attach(llama) as handle:
        llama.generate(IDS, max_new_tokens=9, do_sample=False)
        assert "; full attention is faster up to" in str(handle.stats()), "why auto took it"
    with kvthaw.attach(llama, "oracle", budget=32) as handle, torch.no_grad():
        llama(IDS, past_key_values=kvthaw.Cache(llama, "oracle", budget=32))
        llama(IDS, past_key_values=handle.cache)
        assert "60 later prompt tokens attended to everything" in str(handle.stats())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": "auto"}, "full attention is faster up to"),
        ({"method": "full"}, "full has no index"),
        ({"method": "oracle", "budget": 128}, "the budget of 128 has room for all 68 tokens"),
        ({"method": "oracle", "budget": 32}, ""),
    ],
    ids=str,
)
def test_stats_say_why_there_was_no_choice(llama: PreTrainedModel, settings: dict, words: str) -> None:
    with kvthaw.attach(llama, **settings) as handle:
        llama.generate(IDS, max_new_tokens=9, do_sample=False)
        assert handle.stats().no_choice.startswith(words)
        assert bool(handle.stats().no_choice) is bool(words)


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        ("oracle", {"budget": 32}, "oracle, budget 32"),
        ("icecache-digest", {}, "icecache-digest, budget 1024"),
        ("oracle", {"budget": 0.5}, "oracle, budget 0.5"),
        ("quest", {"retrieved": 9}, "quest, 9 retrieved"),
        ("full", {}, "full;"),
    ],
)
def test_handles_and_caches_say_what_they_are(llama: PreTrainedModel, method: str, settings: dict, words: str) -> None:
    cache = kvthaw.Cache(llama, method, **settings)
    assert words in repr(cache)
    assert "0 tokens" in repr(cache)
    with torch.no_grad():
        llama(prompt(2, 60), past_key_values=cache)
    assert "60 tokens in each of 2 rows; KV " in repr(cache)
    with kvthaw.attach(llama, method, **settings) as handle:
        assert words in repr(handle)
        assert "LlamaForCausalLM" in repr(handle)
        assert "nothing was generated yet" in repr(handle)
        llama.generate(IDS, max_new_tokens=4, do_sample=False)
        assert words in repr(handle)
        assert "63 tokens; KV " in repr(handle)
    assert "detached" in repr(handle)
    assert str(handle.stats()) in repr(handle)
