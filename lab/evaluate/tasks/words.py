"""RULER's aggregation tasks (Hsieh et al., 2024): the most common words of a list, the most frequent words of a coded text."""

from __future__ import annotations

import math
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .base import Anywhere, Sample, ahead, depth_of, distinct, fit, prompts, word_list

CWE, CWE_QUESTION, FWE, FWE_QUESTION = prompts("words")
COMMON = 10
ZETA_2 = math.pi**2 / 6


@dataclass(frozen=True)
class CommonWords(Anywhere):
    """cwe: a list with ten words 30 times each and the others 3 times (below 4,096 tokens: 6 times and once), and an example."""

    name: str
    max_new_tokens: int = 120
    stops: tuple[str, ...] = ()

    def sample(self, tokenizer: Any, *, length: int, seed: int, depth: float | None = None, text: str | None = None) -> Sample:
        """See Task.sample; the unit is an uncommon word with its repeats. `depth` and `text` have no effect: common words are
        everywhere. Raises ValueError for a length that all words of the package cannot fill."""
        rng = random.Random(seed)
        every = sorted({*word_list("nouns.txt"), *word_list("adjectives.txt"), *word_list("verbs.txt")})
        short = length < 4096
        shown, times, others = (20, 3, 1) if short else (40, 10, 3)
        example, answers = _listed(rng.sample(every, shown), times, others, seed)
        example = CWE + example + CWE_QUESTION + _numbered(answers) + "\n"
        words = rng.sample(every, len(every))
        times, others = (6, 1) if short else (30, 3)

        def build(n: int, spare: str) -> Sample:
            body, common = _listed(words[: COMMON + n], times, others, seed)
            context = ahead(spare, example + CWE + body)
            return Sample(context, CWE_QUESTION, tuple(common), None)

        return fit(tokenizer, length, build, most=len(words) - COMMON)


@dataclass(frozen=True)
class FrequentWords(Anywhere):
    """fwe: coded words with frequencies from a zeta distribution of alpha 2. The most frequent is noise, and the question asks
    for the next three. There are length / 50 different words."""

    name: str
    max_new_tokens: int = 50
    stops: tuple[str, ...] = ()

    def sample(self, tokenizer: Any, *, length: int, seed: int, depth: float | None = None, text: str | None = None) -> Sample:
        """See Task.sample; the unit is a word of the distribution. `depth` and `text` have no use here."""
        vocabulary = ["...", *distinct(random.Random(seed), _code, max(8, length // 50) - 1)]

        def build(n: int, spare: str) -> Sample:
            total = n + 50  # fewer would not tell the third from the fourth
            counts = [int(total / (rank * rank) / ZETA_2) for rank in range(1, len(vocabulary) + 1)]
            words = [word for word, times in zip(vocabulary, counts, strict=True) for _ in range(times)]
            random.Random(seed).shuffle(words)
            context = ahead(spare, FWE + " ".join(words))
            return Sample(context, FWE_QUESTION, tuple(vocabulary[1:4]), depth_of(context, vocabulary[1]))

        return fit(tokenizer, length, build)


def _listed(words: Sequence[str], times: int, others: int, seed: int) -> tuple[str, list[str]]:
    """Return a numbered list with ten words `times` times and the others `others` times, and the ten words."""
    common, rest = list(words[:COMMON]), list(words[COMMON:])
    order = common * times + rest * others
    random.Random(seed).shuffle(order)
    return _numbered(order), common


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def _code(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_lowercase, k=6))
