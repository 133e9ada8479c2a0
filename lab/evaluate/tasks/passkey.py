"""Pass key retrieval (Mohtashami & Jaggi, 2023): one five-digit number in a text that is about something else."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from .base import GRASS, Haystack, Sample, Whole, depth_of, fit, number, prompts

INTRO, FACT, QUESTION = prompts("passkey")


@dataclass(frozen=True)
class Passkey(Whole):
    """The pass key in the classic filler ("The grass is green. ...") or in a book."""

    name: str
    filler: str | None  # None: the book that ships
    max_new_tokens: int = 8
    stops: tuple[str, ...] = ("\n",)

    def sample(self, tokenizer: Any, *, length: int, seed: int, depth: float | None = None, text: str | None = None) -> Sample:
        """See Task.sample; the unit is a word."""
        rng = random.Random(seed)
        key = number(rng, 5)
        at = rng.random() if depth is None else depth
        haystack = Haystack.of(text or self.filler)
        fact = FACT.format(key=key)

        def build(n: int, spare: str) -> Sample:
            context = INTRO + haystack.with_facts(n, [fact], [at], spare)
            return Sample(context, QUESTION, (key,), depth_of(context, fact))

        return fit(tokenizer, length, build)


GENERATORS = (Passkey("passkey", GRASS), Passkey("passkey_book", None))
