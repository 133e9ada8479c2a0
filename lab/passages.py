"""What selections are watched on: a prompt, and the tokens that are sent after it, one by one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvthaw.errors import ConfigError
from kvthaw.evaluate.files import opening, tokens_of
from lab.evaluate.tasks import TASKS

NEEDLE = TASKS["niah_multikey"]


@dataclass(frozen=True, slots=True)
class Passage:
    """Tokens of a prompt, and those that follow it."""

    prompt: list[int]
    rest: list[int]


def text_passage(tokenizer: Any, *, length: int, steps: int, seed: int, text: str | None = None) -> Passage:
    """`length` tokens of a text and the next `steps`: from its beginning for seed 0, else from a place drawn by the seed.

    text: None is the book that ships. It starts over at its end. Raises ConfigError for a text without tokens.
    """
    first, body = opening(tokenizer), tokens_of(tokenizer, text)
    start = random.Random(seed).randrange(len(body)) if seed else 0
    count = max(0, length - len(first)) + steps
    turns = -(-(start + count) // len(body))
    tokens = [*first, *(body * turns)[start : start + count]]
    return Passage(tokens[:length], tokens[length:])


def needle_passage(tokenizer: Any, *, length: int, steps: int, seed: int, text: str | None = None) -> Passage:
    """Four needles in a text and the question for one of them, about `length` tokens, with the answer behind; the last `steps`
    tokens of question and answer follow, or all of them if they are fewer.

    text: the haystack; None is the book that ships. Raises ConfigError for a length that is too short.
    """
    try:
        sample = NEEDLE.sample(tokenizer, length=length, seed=seed, text=text)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    tokens: list[int] = list(tokenizer(f"{sample.prompt} {', '.join(sample.answers)}.")["input_ids"])
    context = len(tokenizer(sample.context)["input_ids"])
    cut = max(len(tokens) - steps, min(context, len(tokens) - 1))
    return Passage(tokens[:cut], tokens[cut:])


PASSAGES: dict[str, Callable[..., Passage]] = {"text": text_passage, "needle": needle_passage}
"""What makes a passage of a kind."""
