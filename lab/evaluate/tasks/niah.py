"""Needles in a haystack, in RULER's wording (Hsieh et al., 2024): one, many keys, many values, many queries."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

from .base import GRASS, Haystack, Sample, Whole, depth_of, distinct, fit, number, prompts, uuid, word_key

Kind = Literal["words", "numbers", "uuids"]
MAKE = {"words": word_key, "numbers": number, "uuids": uuid}

INTRO, INTRO_ONE, NEEDLE, QUESTION, QUESTION_ONE = prompts("niah")


@dataclass(frozen=True)
class Niah(Whole):
    """One of RULER's needle tasks. `haystack`: the book, the grass filler line by line, or other needles."""

    name: str
    haystack: Literal["book", "grass", "needles"] = "book"
    keys: int = 1  # number of keys in the text (needles: without the haystack's own)
    values: int = 1  # values a key
    queries: int = 1  # keys that are asked for
    key_kind: Kind = "words"
    value_kind: Kind = "numbers"
    stops: tuple[str, ...] = ("\n",)

    @property
    def max_new_tokens(self) -> int:
        """Room for the values of all requested keys: 8 tokens, and 40 for each UUID or 16 for each other value."""
        return 8 + self.queries * self.values * (40 if self.value_kind == "uuids" else 16)

    def sample(self, tokenizer: Any, *, length: int, seed: int, depth: float | None = None, text: str | None = None) -> Sample:
        """See Task.sample; the unit is a word, a line of filler or a needle. `depth` is that of the first requested key."""
        rng = random.Random(seed)
        keys = distinct(rng, MAKE[self.key_kind], max(self.keys, self.queries))
        values = [distinct(rng, MAKE[self.value_kind], self.values) for _ in keys]
        needles = [self._needle(k, v) for k, vs in zip(keys, values, strict=True) for v in vs]
        depths = [rng.random() for _ in needles]
        asked = keys[: self.queries]
        if depth is not None:
            depths[0] = depth
            depths[1 : self.values] = [depth + (1 - depth) * d for d in depths[1 : self.values]]
        one = self.queries * self.values == 1
        query = ", ".join(asked[:-1]) + ", and " + asked[-1] if len(asked) > 1 else asked[0]
        fields = {"kind": self.value_kind, "one": self.value_kind[:-1], "query": query}
        question = (QUESTION_ONE if one else QUESTION).format(**fields)
        intro = (INTRO_ONE if one else INTRO).format(**fields)
        answers = tuple(v for vs in values[: self.queries] for v in vs)
        words = Haystack.of(text) if self.haystack == "book" or text else None

        def build(n: int, spare: str) -> Sample:
            if words is not None:
                body = words.with_facts(n, needles, depths, spare)
            else:
                body = "\n".join([*self._lines(n, needles, depths, seed, set(keys)), *([spare] if spare else [])])
            context = intro + body
            return Sample(context, question, answers, depth_of(context, needles[0]))

        return fit(tokenizer, length, build)

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.value_kind, key=key, value=value)

    def _lines(self, n: int, needles: list[str], depths: list[float], seed: int, taken: set[str]) -> list[str]:
        lines = [GRASS] * n
        if self.haystack == "needles":
            rng = random.Random(f"{seed} haystack")
            for i in range(n):
                key = MAKE[self.key_kind](rng)
                while key in taken:
                    key = MAKE[self.key_kind](rng)
                lines[i] = self._needle(key, MAKE[self.value_kind](rng))
        for depth, needle in sorted(zip(depths, needles, strict=True), reverse=True):
            lines.insert(round(depth * n), needle)
        return lines


GENERATORS = (
    Niah("niah_single"),
    Niah("niah_single_grass", haystack="grass"),
    Niah("niah_single_uuid", value_kind="uuids"),
    Niah("niah_multikey", keys=4),
    Niah("niah_multikey_needles", haystack="needles"),
    Niah("niah_multikey_uuid", haystack="needles", key_kind="uuids", value_kind="uuids"),
    Niah("niah_multivalue", values=4),
    Niah("niah_multiquery", keys=4, queries=4),
)
