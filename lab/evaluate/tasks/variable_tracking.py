"""Variable tracking, in RULER's wording (Hsieh et al., 2024): which variables got this value, through a chain?"""

from __future__ import annotations

import itertools
import random
import string
from dataclasses import dataclass
from typing import Any

from .base import GRASS, Haystack, Sample, Whole, depth_of, distinct, fit, number, prompts

INTRO, FIRST, NEXT, QUESTION = prompts("variable_tracking")
EXAMPLE_LINES = 10


def variable(rng: random.Random, letters: int = 5) -> str:
    """Capital letters."""
    return "".join(rng.choices(string.ascii_uppercase, k=letters))


@dataclass(frozen=True)
class VariableTracking(Whole):
    """Chains of assignments in filler or, with `text`, in a text. The wording, with its slip, is RULER's.

    example: put a short solved one, of variables of three letters, before it, as RULER does.
    """

    name: str = "variable_tracking"
    chains: int = 1
    hops: int = 4
    max_new_tokens: int = 48
    stops: tuple[str, ...] = ("\n",)
    example: bool = False

    def sample(self, tokenizer: Any, *, length: int, seed: int, depth: float | None = None, text: str | None = None) -> Sample:
        """See Task.sample; the unit is a word of the text, or a line of filler. `depth` is that of the first link."""
        solved = self._solved(random.Random(f"{seed} example")) if self.example else ""
        rng = random.Random(seed)
        names, facts, depths, question = self._chains(rng, 5, depth)

        def build(n: int, spare: str) -> Sample:
            body = Haystack.of(text).with_facts(n, facts, depths, spare) if text else self._lines(n, facts, depths, spare)
            context = solved + INTRO + body
            return Sample(context, question, tuple(names), depth_of(context, facts[0]))

        return fit(tokenizer, length, build)

    def _chains(self, rng: random.Random, letters: int, depth: float | None) -> tuple[list[str], list[str], list[float], str]:
        """Return the first chain's variables, all assignments, the position of each, and the question."""
        steps = self.hops + 1
        names = distinct(rng, lambda r: variable(r, letters), steps * self.chains)
        values = distinct(rng, lambda r: number(r, 5), self.chains)
        facts: list[str] = []
        depths: list[float] = []
        for chain, value in enumerate(values):
            mine = names[chain * steps : (chain + 1) * steps]
            facts.append(FIRST.format(name=mine[0], value=value))
            facts += [NEXT.format(name=a, before=b) for b, a in itertools.pairwise(mine)]
            places = sorted(rng.random() for _ in mine)
            if chain == 0 and depth is not None:
                places = [depth, *sorted(depth + (1 - depth) * rng.random() for _ in mine[1:])]
            depths += places
        return names[:steps], facts, depths, QUESTION.format(value=values[0], count=steps)

    def _solved(self, rng: random.Random) -> str:
        names, facts, depths, question = self._chains(rng, 3, None)
        return f"{INTRO}{self._lines(EXAMPLE_LINES, facts, depths, '')}{question} {' '.join(names)}\n\n\n\n"

    @staticmethod
    def _lines(n: int, facts: list[str], depths: list[float], spare: str) -> str:
        lines = [GRASS + "\n"] * n
        order = sorted(range(len(facts)), key=lambda i: (depths[i], i), reverse=True)
        for i in order:
            lines.insert(round(depths[i] * n), facts[i])
        return " ".join([*lines, spare]).rstrip()


GENERATORS = (VariableTracking(),)
