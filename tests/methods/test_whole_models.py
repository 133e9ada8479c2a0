"""Whole tiny models under every method, at its defaults and at options that take other code paths."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

import kvthaw
from kvthaw.methods import METHODS
from zoo import build_exact, prompt, ragged

pytestmark = pytest.mark.slow

OPTIONS = [
    *("quest:page=5", "quest:policy=mean", "quest:policy=mean_query"),
    *("arkvale:page=8:spread=max", "arkvale:policy=mean", "arkvale:policy=mean_query"),
    *("clusterkv:batch=16:clusters_per_batch=2", "clusterkv:distance=l2:clusters=7", "clusterkv:policy=mean_query"),
    *("prkv:interval=16:page=8", "prkv:share=auto:page=8", "prkv:share=1.0", "prkv:policy=mean_query"),
    *("icecache-device:promote=0.2:outliers=0:nodes_per_batch=2", "icecache-device:policy=mean:field=5"),
    *("infinigen:prefetch=False", "shadowkv:rank=8", "freekv:tau=0.3", "pqcache:policy=mean", "retroinfer:segment=64"),
    *(
        "omnikv:dense=False",
        "magicpig:bits=3:tables=20",
        "socket:bits=6:tables=8",
        "socket:policy=mean",
        "twilight:base=icecache",
    ),
]
FROZEN = [name for name, make in METHODS.items() if not make().dense]
METHODS_AND_OPTIONS = FROZEN + OPTIONS
RETRIEVES = [spec for spec in METHODS_AND_OPTIONS if METHODS[spec.partition(":")[0]]().index is not None]


def generate(model: PreTrainedModel, new: int, **inputs: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = model.generate(**inputs, max_new_tokens=new, do_sample=False)
    return made


@pytest.mark.parametrize("method", METHODS_AND_OPTIONS)
def test_a_budget_above_the_length_generates_what_full_attention_does(llama: PreTrainedModel, method: str) -> None:
    batch = ragged([120, 37, 91])
    expected = generate(llama, 16, **batch)
    with kvthaw.attach(llama, method, budget=1024) as handle:
        assert torch.equal(generate(llama, 16, **batch), expected)
        assert handle.stats().sparse_steps > 0


@pytest.mark.parametrize("method", RETRIEVES)
def test_no_step_attends_to_more_than_the_budget(llama: PreTrainedModel, method: str) -> None:
    with kvthaw.attach(llama, method, budget=48) as handle:
        generate(llama, 24, input_ids=prompt(1, 150))
        stats = handle.stats()
    assert stats.attended_max is not None
    assert stats.attended_max <= 48


@pytest.mark.parametrize("method", FROZEN)
def test_a_row_alone_generates_what_it_does_in_a_batch(method: str) -> None:
    llama, ids = build_exact("llama"), prompt(2, 150)
    with kvthaw.attach(llama, method, budget=64):
        deferred = generate(llama, 16, input_ids=ids)
        for row in range(2):
            assert torch.equal(generate(llama, 16, input_ids=ids[row : row + 1])[0], deferred[row])
