"""What every task shares: the sample, how it is scored, and how a haystack is cut to an exact number of tokens."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

ASSETS = Path(__file__).parents[2] / "assets"
GRASS = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@dataclass(frozen=True, slots=True)
class Sample:
    """One long-context question."""

    context: str  # what is cached first
    question: str  # what follows the context; prompt = context + question
    answers: tuple[str, ...]  # every one must be in the output
    depth: float | None  # where the (first) fact stands, 0..1 of the context

    @property
    def prompt(self) -> str:
        """Context and question in one text."""
        return self.context + self.question


class Task(Protocol):
    """A family of questions that can be made at any length."""

    @property
    def name(self) -> str:
        """The name in TASKS."""

    @property
    def max_new_tokens(self) -> int:
        """Enough for a whole answer under the shipped tokenizer."""

    def sample(self, tokenizer: Any, *, length: int, seed: int, depth: float | None = None, text: str | None = None) -> Sample:
        """A sample whose prompt has at most `length` tokens, special tokens included, and no room for one unit more.

        The unit is a word where the haystack is text and a record where it is records. `depth` (0..1) says where the
        fact stands, drawn from the seed if None; `text` is the haystack, the book that ships if None. The same
        arguments give the same sample. Raises ValueError if not even an empty haystack fits `length`.
        """

    def score(self, sample: Sample, output: str) -> float:
        """The share of the answers that stand in `output`, 0..1."""


def score_answers(sample: Sample, output: str) -> float:
    """The share of `sample.answers` found in `output` as a whole: not inside a longer number, word or hyphenated key."""
    found = sum(bool(re.search(rf"(?<![\w-]){re.escape(a)}(?![\w]|-\w)", output)) for a in sample.answers)
    return found / len(sample.answers)


@cache
def read_asset(name: str) -> str:
    """A text that ships with the package."""
    return (ASSETS / name).read_text(encoding="utf-8")


@cache
def word_list(name: str) -> tuple[str, ...]:
    """A word list that ships with the package, one word a line."""
    return tuple(line.strip() for line in read_asset(name).splitlines() if line.strip())


def word_key(rng: random.Random) -> str:
    """An adjective and a noun with a hyphen between, such as `torpid-kid`."""
    return f"{rng.choice(word_list('adjectives.txt'))}-{rng.choice(word_list('nouns.txt'))}"


def number(rng: random.Random, digits: int = 7) -> str:
    """A number of so many digits that does not begin with 0."""
    return str(rng.randint(10 ** (digits - 1), 10**digits - 1))


def uuid(rng: random.Random) -> str:
    """A version 4 UUID."""
    h = f"{rng.getrandbits(128):032x}"
    return f"{h[:8]}-{h[8:12]}-4{h[13:16]}-{'89ab'[int(h[16], 16) % 4]}{h[17:20]}-{h[20:]}"


def distinct(rng: random.Random, make: Callable[[random.Random], str], n: int) -> list[str]:
    """`n` different strings from `make`, in the order drawn."""
    seen: dict[str, None] = {}
    while len(seen) < n:
        seen[make(rng)] = None
    return list(seen)


def count(tokenizer: Any, text: str) -> int:
    """How many tokens a prompt has for the model, special tokens included."""
    return len(tokenizer(text)["input_ids"])


def fit(tokenizer: Any, length: int, build: Callable[[int], Sample]) -> Sample:
    """The sample of the most units whose prompt has at most `length` tokens; `build(n)` makes it with n units.

    Raises ValueError if `build(0)` is longer than `length` already.
    """
    sizes: dict[int, int] = {}

    def size(n: int) -> int:
        if n not in sizes:
            sizes[n] = count(tokenizer, build(n).prompt)
        return sizes[n]

    if size(0) > length:
        raise ValueError(f"length {length} is too short for this task: without a haystack it takes {size(0)} tokens")
    low, high = 0, max(1, (length - size(0)) // 4)
    while size(high) <= length:
        low, high = high, high * 2
    while high - low > 1:
        share = (length - size(low)) / max(1, size(high) - size(low))
        middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
        if size(middle) <= length:
            low = middle
            if middle + 1 < high and size(middle + 1) > length:
                high = middle + 1
        else:
            high = middle
            if middle - 1 > low and size(middle - 1) <= length:
                low = middle - 1
    return build(low)


def sentence_end(words: list[str], at: int, reach: int = 40) -> int:
    """The nearest place from `at` on, at most `reach` words away, where a sentence has just ended; else `at`."""
    if at <= 0 or at >= len(words):
        return max(0, min(at, len(words)))
    for i in range(at, min(at + reach, len(words)) + 1):
        if words[i - 1].rstrip("”’\"')")[-1:] in (".", "!", "?"):
            return i
    return at


@dataclass(frozen=True)
class Haystack:
    """Text as words, taken from its start and again from its start when it runs out; one word is one unit."""

    words: tuple[str, ...]

    @classmethod
    def of(cls, text: str | None) -> Haystack:
        """The words of `text`, or of the book that ships."""
        words = tuple((read_asset("book.txt") if text is None else text).split())
        if not words:
            raise ValueError("the haystack text holds no word")
        return cls(words)

    def take(self, n: int) -> list[str]:
        """The first `n` words, the text repeated as often as needed."""
        times = -(-n // len(self.words))
        return list((self.words * times)[:n])

    def with_facts(self, n: int, facts: list[str], depths: list[float]) -> str:
        """`n` words with each fact put in between two sentences at its depth (0..1), single spaces throughout."""
        words = self.take(n)
        places = [sentence_end(words, round(depth * n)) for depth in depths]
        for i in sorted(range(len(facts)), key=lambda i: (places[i], i), reverse=True):
            words.insert(places[i], facts[i])
        return " ".join(words)


def depth_of(context: str, fact: str) -> float:
    """Where `fact` stands in `context`: 0 if first of all, 1 if last."""
    return context.index(fact) / max(1, len(context) - len(fact))
