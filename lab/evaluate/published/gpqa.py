"""GPQA (Rein et al., 2023): graduate-level multiple choice, in the prompt of OpenAI's simple-evals."""

from __future__ import annotations

import random
from dataclasses import dataclass

from lab.evaluate.tasks.base import prompts

from .answers import choice
from .base import Ask, Benchmark, Item, Record
from .competition import LONG

(PROMPT,) = prompts("gpqa")
PATTERNS = (r"(?i)Answer[ \t]*:[ \t]*\$?([A-D])\$?",)


@dataclass(frozen=True)
class Gpqa(Benchmark):
    """Its CSV files come from the authors, who ask not to republish them; so nothing of them ships.

    The choices are in an order drawn by the number of the record, the same in every run.
    """

    def item(self, record: Record, number: int) -> Item:
        """Fields: Question, Correct Answer, Incorrect Answer 1 to 3."""
        choices = [
            str(record[f"{kind} Answer{i}"]).strip()
            for kind, i in (("Correct", ""), *(("Incorrect", f" {n}") for n in (1, 2, 3)))
        ]
        order = random.Random(number).sample(range(4), 4)
        a, b, c, d = (choices[i] for i in order)
        text = PROMPT.format(question=str(record["Question"]).strip(), a=a, b=b, c=c, d=d)
        return Item(str(record.get("Record ID", number)), "", text, {"answer": "ABCD"[order.index(0)]})

    def score(self, item: Item, output: str, ask: Ask | None = None) -> dict[str, float]:
        """Return the letter after "Answer:"."""
        letter = choice(output.replace("*", ""), PATTERNS)
        return {"score": float(letter == item.gold["answer"]), "answered": float(letter is not None)}


GPQA = tuple(
    Gpqa(f"gpqa_{part}", LONG, ("Idavidrein/gpqa", f"gpqa_{part}", "train"), f"gpqa_{part}")
    for part in ("diamond", "main", "extended")
)
