"""Whole tiny models under every method, at its defaults and at options that take other code paths."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import PreTrainedModel

import kvthaw
from kvthaw.methods import METHODS
from zoo import KINDS, build, ragged

pytestmark = pytest.mark.slow

OPTIONS = [
    *("quest:page=5", "quest:policy=mean", "quest:policy=mean_query"),
    *("arkvale:page=8:spread=max", "arkvale:policy=mean", "arkvale:choice=head:policy=mean_query"),
    *("clusterkv:batch=16:clusters_per_batch=2", "clusterkv:distance=l2:clusters=7", "clusterkv:preset=code"),
    *("prkv:interval=16:page=8", "prkv:share=auto:page=8", "prkv:share=1.0", "prkv:policy=mean_query"),
    *("icecache-digest-device:promote=0.2:outliers=0:nodes_per_batch=2", "icecache-digest-device:policy=mean:field=5"),
    *("infinigen:prefetch=False", "shadowkv:rank=8", "freekv:tau=0.3", "pqcache:policy=mean", "retroinfer:segment=64"),
    *(
        "omnikv:dense=False",
        "magicpig:bits=3:tables=20",
        "socket:bits=6:tables=8",
        "socket:policy=mean",
        "twilight:base=icecache-digest",
    ),
]
FROZEN = [name for name, make in METHODS.items() if not make().dense]
METHODS_AND_OPTIONS = FROZEN + OPTIONS
RETRIEVES = [spec for spec in METHODS_AND_OPTIONS if METHODS[spec.partition(":")[0]]().index is not None]


def generate(model: PreTrainedModel, **inputs: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    return made


BATCH, NEW = ragged([90, 37, 61]), 5


@pytest.fixture
def llama() -> PreTrainedModel:
    """Of two layers, of which the second may reuse what the first has chosen."""
    return build("llama", num_hidden_layers=2)


@functools.cache
def by_full_attention() -> torch.Tensor:
    return generate(build("llama", num_hidden_layers=2), **BATCH)


@pytest.mark.parametrize("method", [*OPTIONS, *(name for name in KINDS if name in FROZEN)])
def test_a_budget_above_the_length_generates_what_full_attention_does(llama: PreTrainedModel, method: str) -> None:
    with kvthaw.attach(llama, method, budget=1024) as handle:
        assert torch.equal(generate(llama, **BATCH), by_full_attention())
        assert handle.stats().sparse_steps > 0


@pytest.mark.parametrize("method", ["full", *METHODS_AND_OPTIONS])
def test_a_method_keeps_its_budget_and_with_a_seed_its_tokens(llama: PreTrainedModel, method: str) -> None:
    with kvthaw.attach(llama, method, budget=32, seed=3) as handle:
        first = generate(llama, **BATCH)
        stats = handle.stats()
        if method in METHODS:
            torch.manual_seed(99)
            assert torch.equal(generate(llama, **BATCH), first)
            assert handle.stats() == stats
    assert stats.to_dict()["attended_max"] == stats.attended_max
    if method == "full":
        assert (stats.budget, stats.attended_max, stats.sparse_steps) == (None, None, 0)
        return
    assert stats.sparse_steps == 2 * (NEW - 1)
    assert stats.attended_mean <= stats.attended_max <= stats.budget <= 32
    if method in RETRIEVES:
        assert 0 < stats.retrieved <= stats.attended_mean
        assert 0 <= stats.hit_rate < 1
        assert stats.fetched_bytes > 0
        assert stats.kv_host_bytes >= 2 * 2 * 90 * 2 * 16 * 4
