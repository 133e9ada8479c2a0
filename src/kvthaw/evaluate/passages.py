"""What selections are watched on: a prompt, and the tokens that are sent after it, one by one."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Any, Literal

from kvthaw.errors import ConfigError
from kvthaw.evaluate.tasks import TASKS
from kvthaw.evaluate.tasks.base import read_asset

Kind = Literal["text", "needle"]
NEEDLE = TASKS["niah_multikey"]


@dataclass(frozen=True, slots=True)
class Passage:
    """Tokens of a prompt, and those that follow it."""

    prompt: list[int]
    rest: list[int]


def text_passage(tokenizer: Any, *, length: int, steps: int, seed: int, text: str | None = None) -> Passage:
    """`length` tokens of a text and the next `steps`: from its beginning for seed 0, else from a place drawn by the seed.

    text: None is the book that ships. It begins anew where it ends. Raises ConfigError for a text without tokens.
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


PASSAGES = {"text": text_passage, "needle": needle_passage}
"""Kind -> what makes a passage."""


def _bare(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return found


def tokens_of(tokenizer: Any, text: str | None) -> list[int]:
    """The tokens of a text, None the book that ships, without special ones. Raises ConfigError for a text without tokens."""
    body = _bare(tokenizer, read_asset("book.txt") if text is None else text)
    if not body:
        raise ConfigError("the text holds no tokens")
    return list(body)


def opening(tokenizer: Any) -> list[int]:
    """The special tokens before a prompt."""
    whole, bare = list(tokenizer("a")["input_ids"]), list(_bare(tokenizer, "a"))
    at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
    return whole[:at]


def text_name(text: str | None) -> str:
    """What settings call a text: its hash, or "book" for what ships."""
    return "book" if text is None else hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
