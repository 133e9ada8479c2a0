"""What a command's methods and limits ask for."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from kvthaw.engine.decode import generate
from kvthaw.engine.prefill import prefill
from kvthaw.errors import ConfigError
from kvthaw.evaluate.variant import Variant, fork, read_variants, whole
from kvthaw.methods import METHODS, resolve


def test_a_methods_own_limits_stand_beside_the_common_ones() -> None:
    found = read_variants("full,quest,pqcache:budget=0.2,pariskv:retrieved=100:rho=0.2:beta=0.1", [64, 128], [7], [0])
    assert found == [
        Variant("full"),
        Variant("quest", 64, None, 0),
        Variant("quest", 128, None, 0),
        Variant("quest", None, 7, 0),
        Variant("pqcache", 0.2, None, 0),
        Variant("pariskv:rho=0.2:beta=0.1", None, 100, 0),
    ]
    assert read_variants(["quest:budget=256,sink=4", "quest:dense_layers=1"]) == [
        Variant("quest:sink=4", 256),
        Variant("quest", dense_layers=1),
    ]


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        ("quest:budget=3", "budget is 3; the smallest"),
        ("quest:budget=64:retrieved=8", "give one of them"),
        ("quest:budget=much", "budget is 'much'"),
        ("quest:sink=few", "sink is 'few'"),
        ("quest:window=0", "window is 0; it must be at least 1"),
        ("quest:sinks=4", "no option 'sinks'"),
        ("full:budget=64", "full attends to everything"),
        ("streaming:window=4", "streaming retrieves nothing"),
        ("full,qwest", "did you mean 'quest'"),
    ],
)
def test_what_no_cache_would_take_is_refused_without_a_model(methods: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_variants(methods)


@pytest.mark.parametrize("name", [name for name in METHODS if resolve(name).index is not None])
def test_every_method_that_retrieves_takes_regions(name: str) -> None:
    regions = resolve(name, sink=4, window=20, buffer=6).regions
    assert (regions.sink, regions.window, regions.buffer) == (4, 20, 6)


def test_a_fork_attends_by_the_regions_asked_for(llama: PreTrainedModel) -> None:
    (variant,) = read_variants("quest:budget=64,sink=4,window=20,buffer=6")
    base = whole(llama, [variant])
    logits = prefill(llama, base, [i % 50 + 3 for i in range(200)])
    cache = fork(base, variant)
    list(generate(llama, cache, logits, limit=2))
    stats = cache.stats()
    assert (stats.regions, stats.budget) == (resolve(variant.method).regions, 64)
    assert 0 < (stats.attended_max or 0) <= 64
