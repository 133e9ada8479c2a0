"""Several answers to a prompt as rows of a batch, and what ends them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvthaw import Cache
from kvthaw.engine.hf.model import load
from kvthaw.engine.prefill import prefill
from kvthaw.engine.sampling import Sampling
from lab.evaluate.answers import Answers


@pytest.fixture
def loaded(endless: Path) -> tuple[Any, Any]:
    model, tokenizer = load(str(endless))
    return model.double(), tokenizer  # rounding, which depends on the rows beside, decides nothing


def answers(
    loaded: tuple[Any, Any],
    seeds: list[int],
    method: str = "oracle",
    *,
    question: int = 0,
    limit: int = 12,
    stops: tuple[str, ...] = (),
    **how: Any,
) -> list[tuple[str, int, bool]]:
    """Text, tokens and whether it was stopped, of each row."""
    model, tokenizer = loaded
    ids = tokenizer("<s>" + "The quick brown fox jumps over the lazy dog. " * 8)["input_ids"]
    base = Cache(model, "full")
    logits = prefill(model, base, ids[: len(ids) - question])
    cache = base.fork(method, **({} if method == "full" else {"budget": 64}))
    if len(seeds) > 1:
        cache.batch_repeat_interleave(len(seeds))
    sampling = [Sampling(seed=seed, **how) for seed in seeds]
    found = Answers(model, tokenizer, cache, sampling=sampling, until=stops, after_first_word=False)
    for _ in found.stream(logits.expand(len(seeds), -1), [ids[len(ids) - question :]] * len(seeds), limit):
        pass
    return list(zip(found.texts, found.new_tokens, found.stopped, strict=True))


@pytest.mark.parametrize("method", ["full", "oracle", "icecache-digest"])
def test_an_answer_drawn_in_a_batch_is_the_one_drawn_alone(loaded: tuple[Any, Any], method: str) -> None:
    how: dict[str, Any] = {"stops": tuple("abcdefghijklmnopqr"), "temperature": 1.0, "top_p": 0.95}
    together = answers(loaded, [1, 2, 3, 4], method, **how)
    assert len({text for text, _, _ in together}) > 1
    assert len({tokens for _, tokens, _ in together}) > 1  # rows end at different steps
    assert together == [answers(loaded, [seed], method, **how)[0] for seed in (1, 2, 3, 4)]


def test_a_question_after_the_context_gives_full_attentions_answer(loaded: tuple[Any, Any]) -> None:
    assert answers(loaded, [0], "full", question=20, limit=8) == answers(loaded, [0], "full", limit=8)


def test_an_answer_ends_before_a_stop_string_and_says_so(loaded: tuple[Any, Any]) -> None:
    ((whole, tokens, ended),) = answers(loaded, [0], "full")
    assert (tokens, ended) == (12, False)
    stop = whole[5:8]
    ((found, tokens, ended),) = answers(loaded, [0], "full", stops=("never this", stop))
    assert found == whole[: whole.index(stop)]
    assert tokens < 12
    assert ended
