"""A budget that is a fraction follows the length."""

from __future__ import annotations

import math

import pytest
from transformers import PreTrainedModel

from kvthaw import ConfigError
from kvthaw.engine.decode import generate
from kvthaw.engine.hf import Cache
from kvthaw.engine.prefill import prefill
from kvthaw.methods import METHODS, resolve
from zoo import build

PROMPT = [i * 7 % 50 + 3 for i in range(200)]


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has caches grow by eight tokens."""
    for module in ("sequences", "forward"):
        monkeypatch.setattr(f"kvthaw.cache.{module}.roomier", lambda have, need: need + 8)


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("name", [name for name in METHODS if resolve(name).index is not None])
def test_a_fraction_is_of_the_current_length(name: str) -> None:
    model = build("llama", num_hidden_layers=2)
    cache = Cache(model, name, budget=0.25, dense_layers=0)
    logits = prefill(model, cache, PROMPT)
    first = cache.stats()
    list(generate(model, cache, logits, limit=10))
    stats = cache.stats()
    assert (first.budget, stats.regions) == (50, first.regions)
    length = cache.get_seq_length()
    assert 50 < (stats.budget or 0) <= math.ceil(0.25 * length)
    assert (stats.attended_max or 0) <= (stats.budget or 0)


@pytest.mark.usefixtures("tight")
def test_a_fraction_that_is_retrieved_shrinks_no_region(llama: PreTrainedModel) -> None:
    cache = Cache(llama, "pqcache", retrieved=0.25, dense_layers=0)
    logits = prefill(llama, cache, PROMPT)
    assert cache.stats().budget == 50 + cache.stats().regions.held
    list(generate(llama, cache, logits, limit=24))
    stats = cache.stats()
    assert stats.regions == cache.settings.method.regions
    assert 50 < (stats.budget or 0) - stats.regions.held <= math.ceil(0.25 * cache.get_seq_length())
    with pytest.raises(ConfigError, match="retrieved is 1\\.5"):
        Cache(llama, "pqcache", retrieved=1.5)


@pytest.mark.usefixtures("tight")
def test_rows_beyond_the_first_budget_are_attended_to(llama: PreTrainedModel) -> None:
    caches = [Cache(llama, "oracle", budget=budget, dense_layers=0) for budget in (0.98, 400)]
    grown, whole = ([*generate(llama, cache, prefill(llama, cache, PROMPT), limit=60)] for cache in caches)
    assert grown == whole
    assert (caches[0].stats().budget or 0) > 240


@pytest.mark.gpu
@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("name", ["oracle", "prkv", "pariskv-plus", "icecache-digest"])
def test_gpu_captured_steps_are_the_eager_ones(name: str, llama: PreTrainedModel) -> None:
    model, told = llama.to("cuda"), []
    for capture in (True, False):
        cache = Cache(model, name, budget=0.25, dense_layers=0)
        tokens = [*generate(model, cache, prefill(model, cache, PROMPT), limit=60, capture=capture)]
        told.append((tokens, cache.stats().budget))
        assert (cache.stats().captures > 0) is capture
    assert told[0] == told[1]
