"""Likelihoods under a budget: the end of a prompt and what follows it, token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kvthaw.errors import ConfigError
from kvthaw.evaluate.prefills import Prompt, divide
from kvthaw.evaluate.variant import FULL, Variant

TEXT = "The quick brown fox jumps over the lazy dog. " * 6


def plain(model: Any, prompt: list[int], continuation: list[int]) -> tuple[float, bool]:
    """The definition: one pass of the model over all of it."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + continuation[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    scores = torch.log_softmax(logits.double(), dim=-1)
    greedy = scores.argmax(dim=-1).tolist() == continuation
    return float(scores[range(len(continuation)), continuation].sum()), greedy


@pytest.mark.parametrize("tail", [0, 20, 10_000])
def test_full_attention_gives_the_models_own_likelihood(loaded: tuple[Any, Any], tail: int) -> None:
    model, tokenizer = loaded
    ids, more = tokenizer(TEXT[:90])["input_ids"], tokenizer("a cat")["input_ids"]
    prompt = Prompt(model, ids, tail)
    total, greedy = prompt.loglikelihood(FULL, more)
    expected, _ = plain(model, ids, more)
    assert total == pytest.approx(expected, abs=1e-3)
    assert not greedy
    assert prompt.loglikelihood(FULL, more)[0] == total  # one prompt tells any number


def test_the_likeliest_continuation_is_known_as_such(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    ids = tokenizer(TEXT)["input_ids"]
    best: list[int] = []
    for _ in range(3):
        with torch.no_grad():
            best.append(int(model(torch.tensor([ids + best]), use_cache=False).logits[0, -1].argmax()))
    assert Prompt(model, ids, 5).loglikelihood(FULL, best)[1]
    assert not Prompt(model, ids, 5).loglikelihood(FULL, [*best[:2], (best[2] + 1) % 256])[1]


def test_a_method_has_a_part_in_what_follows_and_in_the_tail_only(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    ids, more = tokenizer(TEXT)["input_ids"], tokenizer("a cat")["input_ids"]
    streaming, full = Variant("streaming", 64), Prompt(model, ids, 0).loglikelihood(FULL, more)[0]
    assert Prompt(model, ids, 0).loglikelihood(streaming, more[:1]) == Prompt(model, ids, 0).loglikelihood(FULL, more[:1])
    without, with_tail = (Prompt(model, ids, tail).loglikelihood(streaming, more)[0] for tail in (0, 30))
    assert math.fabs(without - full) > 1e-2
    assert math.fabs(with_tail - without) > 1e-2
    cache, _ = Prompt(model, ids, 30).cache(streaming)
    assert cache.get_seq_length() == len(ids)
    stats = cache.stats()
    assert stats.sparse_steps == 2 * 30  # layers x steps
    assert (stats.attended_max or 0) <= 64


def test_a_prompt_keeps_one_token_before_its_tail() -> None:
    assert divide([1, 2, 3], 0) == ([1, 2, 3], [])
    assert divide([1, 2, 3], 2) == ([1], [2, 3])
    assert divide([1, 2, 3], 9) == ([1], [2, 3])


def test_bad_input_is_refused(loaded: tuple[Any, Any]) -> None:
    with pytest.raises(ConfigError, match="the prompt is empty"):
        divide([], 1)
    with pytest.raises(ConfigError, match="tail is -1; it must be at least 0"):
        divide([1], -1)
    with pytest.raises(ConfigError, match="the continuation is empty"):
        Prompt(loaded[0], [1, 2], 1).loglikelihood(FULL, [])
