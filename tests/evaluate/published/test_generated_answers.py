"""Drawing tokens, answers as rows of a batch, and what ends them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import bytemodel
from kvthaw import Cache
from kvthaw.errors import ConfigError
from kvthaw.evaluate.decode import prefill
from kvthaw.evaluate.model import load
from kvthaw.evaluate.published import Plan
from kvthaw.evaluate.published.generate import Answer, Stops, draw, generate


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    model, tokenizer = load(str(bytemodel.save(tmp_path_factory.mktemp("model"))))
    return model.double(), tokenizer  # rounding, which depends on the rows beside, decides nothing


LOGITS = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()


def shares(plan: Plan, logits: torch.Tensor = LOGITS, n: int = 4000) -> torch.Tensor:
    """How often each token is drawn, over even numbers."""
    drawn = draw(logits.expand(n, -1), plan, (torch.arange(n) + 0.5) / n)
    return torch.bincount(drawn, minlength=logits.numel()) / n


def test_tokens_are_drawn_by_their_probability() -> None:
    assert torch.allclose(shares(Plan(1, temperature=1.0)), LOGITS.exp(), atol=1e-3)
    order = torch.tensor([2, 0, 3, 1])
    assert torch.allclose(shares(Plan(1, temperature=1.0), LOGITS[order]), LOGITS[order].exp(), atol=1e-3)
    sharp = torch.softmax(LOGITS / 0.5, dim=0)
    assert torch.allclose(shares(Plan(1, temperature=0.5)), sharp, atol=1e-3)


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    for top_p, kept in ((0.4, 1), (0.6, 2), (0.9, 3), (0.96, 4), (1.0, 4)):
        expected = LOGITS.exp().clone()
        expected[kept:] = 0
        found = shares(Plan(1, temperature=1.0, top_p=top_p))
        assert torch.allclose(found, expected / expected.sum(), atol=1e-3), top_p


def test_temperature_0_takes_the_likeliest() -> None:
    assert draw(LOGITS.flip(0)[None], Plan(1), torch.tensor([0.999])).tolist() == [3]


@pytest.mark.parametrize("u", [0.0, 1 - 2**-24])
def test_numbers_at_both_ends_draw_tokens_that_are_there(u: float) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]])
    assert draw(logits, Plan(1, temperature=1.0), torch.tensor([u])).item() in (1, 2)


def answers(loaded: tuple[Any, Any], plan: Plan, seeds: list[int], method: str = "oracle", question: int = 0) -> list[Answer]:
    model, tokenizer = loaded
    ids = tokenizer("<s>" + "The quick brown fox jumps over the lazy dog. " * 8)["input_ids"]
    cache = Cache(model, "full")
    logits = prefill(model, cache, ids[: len(ids) - question])
    budget = {} if method == "full" else {"budget": 64}
    rest = ids[len(ids) - question :]
    draws = [random.Random(seed) for seed in seeds]
    return generate(model, tokenizer, cache.fork(method, **budget), logits, rest, plan, draws, frozenset())


@pytest.mark.parametrize("method", ["full", "oracle", "icecache"])
def test_an_answer_drawn_in_a_batch_is_the_one_drawn_alone(loaded: tuple[Any, Any], method: str) -> None:
    plan = Plan(12, stops=tuple("abcdefghijklmnopqr"), temperature=1.0, top_p=0.95)
    together = answers(loaded, plan, [1, 2, 3, 4], method)
    assert len({answer.text for answer in together}) > 1
    assert len({len(answer.tokens) for answer in together}) > 1  # rows leave at different steps
    assert together == [answers(loaded, plan, [seed], method)[0] for seed in (1, 2, 3, 4)]


def test_the_same_numbers_draw_the_same_answer(loaded: tuple[Any, Any]) -> None:
    plan = Plan(8, temperature=0.6, top_p=0.95)
    assert answers(loaded, plan, [5]) == answers(loaded, plan, [5])


def test_a_question_after_the_context_gives_full_attentions_answer(loaded: tuple[Any, Any]) -> None:
    assert answers(loaded, Plan(8), [0], "full", question=20) == answers(loaded, Plan(8), [0], "full")


def test_an_answer_ends_before_a_stop_string_and_says_so(loaded: tuple[Any, Any]) -> None:
    (whole,) = answers(loaded, Plan(12), [0], "full")
    assert len(whole.tokens) == 12
    assert not whole.ended
    stop = whole.text[5:8]
    at = whole.text.index(stop)
    (found,) = answers(loaded, Plan(12, stops=("never this", stop)), [0], "full")
    assert found.text == whole.text[:at]
    assert stop in loaded[1].decode(found.tokens)
    assert stop not in loaded[1].decode(found.tokens[:-1])
    assert found.ended


def test_a_stop_string_is_found_across_tokens_and_characters(loaded: tuple[Any, Any]) -> None:
    tokenizer = loaded[1]
    stops = Stops(tokenizer, ("…end", "\n\n"))
    tokens = tokenizer("x" * 100 + "…end")["input_ids"]
    assert [stops.ended(tokens[:n]) for n in range(len(tokens) - 2, len(tokens) + 1)] == [False, False, True]
    assert stops.cut("a\n\nb…end") == "a"
    assert stops.cut("a…end\n\n") == "a"
    assert Stops(tokenizer, ()).cut("all") == "all"


def test_no_draws_are_refused(loaded: tuple[Any, Any]) -> None:
    with pytest.raises(ConfigError, match="no answer was asked for"):
        answers(loaded, Plan(1), [])
