"""Assisted decoding verifies its candidates through the index, so its greedy output is the method's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

import kvthaw
from kvthaw.methods import resolve
from kvthaw.regions import Regions
from zoo import KINDS, ROLLS_BACK_SLIDING, build, build_exact, prompt

IDS = prompt(1, 130)
TIGHT = 64
NEW = 15


def new_tokens(model: PreTrainedModel, ids: Tensor = IDS, **how: Any) -> Tensor:
    return model.generate(ids, do_sample=False, max_new_tokens=NEW, **how)[:, ids.shape[1] :]


def drafting(model: PreTrainedModel, candidates: int = 8) -> PreTrainedModel:
    """An assistant that is of another opinion than the model now and then, and always gives so many candidates."""
    with torch.no_grad():
        model.get_output_embeddings().weight += 0.01 * torch.randn_like(model.get_output_embeddings().weight)
    config = model.generation_config
    config.num_assistant_tokens_schedule, config.num_assistant_tokens = "constant", candidates
    config.assistant_confidence_threshold = 0.0
    return model


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gemma3n"])
def test_an_assistant_gives_the_methods_own_tokens(architecture: str) -> None:
    if architecture.startswith("gemma") and not ROLLS_BACK_SLIDING:
        pytest.skip("this version of transformers fails to roll back its own sliding-window layers")
    model, assistant = build(architecture), drafting(build(architecture))
    with kvthaw.attach(model, "oracle", budget=TIGHT) as handle:
        expected = new_tokens(model)
        assert torch.equal(new_tokens(model, assistant_model=assistant), expected)
        stats = handle.stats()
        assert stats.dense_tokens == 0
        assert stats.attended_max is not None
        assert stats.attended_max <= TIGHT


def test_prompt_lookup_gives_the_methods_own_tokens(llama: PreTrainedModel) -> None:
    ids = torch.cat((IDS, IDS), dim=1)
    with kvthaw.attach(llama, "oracle", budget=TIGHT, prefill_chunk=50) as handle:
        expected = new_tokens(llama, ids)
        assert torch.equal(new_tokens(llama, ids, prompt_lookup_num_tokens=8), expected)
        assert handle.stats().dense_tokens == 0


@pytest.fixture(scope="module")
def exact() -> PreTrainedModel:
    """Of three layers: omnikv's last one reuses what the one before has chosen."""
    return build_exact("llama", num_hidden_layers=3)


ROUNDS = (2, 1, 5, 3)
SHORT = (2, 1, 3, 2, 1, 2)  # no token leaves a ring in some of them


@pytest.mark.parametrize(
    ("method", "budget", "rounds"), [*((name, 16, ROUNDS) for name in KINDS), ("h2o", 32, SHORT), ("prkv", 32, SHORT)]
)
def test_candidates_that_are_not_accepted_leave_nothing_behind(
    exact: PreTrainedModel, method: str, budget: int, rounds: tuple[int, ...]
) -> None:
    one_by_one, cache = (kvthaw.Cache(exact, method, budget=budget) for _ in range(2))
    verify(exact, cache, rounds, one_by_one)
    assert method == "full" or max(cache.stats().attended_mean, cache.stats().attended_max) <= budget


def test_rejected_candidates_leave_no_rows_in_the_store(exact: PreTrainedModel) -> None:
    """More of them than the window holds, so that some were offloaded; every stored row is attended to."""
    method = replace(resolve("oracle"), regions=Regions(1, 2, 2))
    verify(exact, kvthaw.Cache(exact, method, budget=64), (1, 3, 7), DynamicCache(config=exact.config), candidates=12)


def verify(model: PreTrainedModel, cache: Cache, rounds: Sequence[int], one_by_one: Cache, candidates: int = 0) -> None:
    """Accept so many candidates of each round; all outputs are those of the tokens one by one."""
    candidates = candidates or max(rounds)
    at, end = 40, 40 + sum(rounds)
    ids, junk = prompt(1, end, seed=1), prompt(1, candidates, seed=2)
    with torch.no_grad():
        for each in (one_by_one, cache):
            model(ids[:, :at], past_key_values=each)
        expected = torch.cat([model(token, past_key_values=one_by_one).logits for token in ids[:, at:].split(1, dim=1)], dim=1)
        for accepted in rounds:
            with cache.verification():
                logits = model(torch.cat((ids[:, at : at + accepted], junk[:, accepted:]), dim=1), past_key_values=cache).logits
            cache.crop(accepted - candidates)
            torch.testing.assert_close(logits[0, :accepted], expected[0, at - 40 : at - 40 + accepted], atol=1e-4, rtol=1e-4)
            at += accepted
    assert cache.get_seq_length() == at


def test_a_cache_of_the_callers_own(llama: PreTrainedModel) -> None:
    assistant = drafting(build("llama"))
    with kvthaw.attach(llama, "oracle", budget=TIGHT):
        expected = new_tokens(llama)
        cache = kvthaw.Cache(llama, "oracle", budget=TIGHT)
        assert torch.equal(new_tokens(llama, past_key_values=cache, assistant_model=assistant), expected)
        assert cache.stats().dense_tokens == 0


def test_stats_count_the_tokens_of_dense_continuations(llama: PreTrainedModel) -> None:
    cache = kvthaw.Cache(llama, "oracle", budget=TIGHT)

    def forward(tokens: int) -> int:
        with torch.no_grad():
            llama(IDS[:, :tokens], past_key_values=cache)
        return cache.stats().dense_tokens

    with cache.prompt(100):
        assert forward(60) == 0
        assert forward(40) == 0
    assert forward(10) == 0, "through the index"
    assert forward(21) == 21
    assert forward(1) == 21
    with cache.prompt(30):
        assert forward(20) == 41
        assert forward(10) == 51
    fork = cache.fork("clusterkv")
    assert fork.stats().dense_tokens == 0
    with torch.no_grad():
        llama(IDS[:, :21], past_key_values=fork)
    assert fork.stats().dense_tokens == 21
    cache.reset()
    assert forward(100) == 0
