r"""Competition mathematics: MATH-500 (Lightman et al., 2023) and AIME 2024 and 2025, answered step by step in a \boxed{}."""

from __future__ import annotations

from dataclasses import dataclass

from .answers import boxed, number, same_math
from .base import Ask, Benchmark, Generation, Item, Record

REASON = r"Please reason step by step, and put your final answer within \boxed{}."
LONG = Generation(32768, temperature=0.6, top_p=0.95)
"""What reasoning models are measured with (DeepSeek-R1, Qwen3; PRKV section 5): drawn answers of up to 32k tokens."""


@dataclass(frozen=True)
class Competition(Benchmark):
    """Problems with one answer each. `integer`: the answer is a whole number (AIME: 0 to 999), compared as one.

    There is no prompt of the authors'; this is the one that DeepSeek-R1 and Qwen3 recommend and the papers' models are asked with.
    """

    integer: bool = False

    def item(self, record: Record, number: int) -> Item:
        """Fields: problem (or Problem), answer (or Answer, expected_answer); whichever copy of the data has them."""
        problem, answer = (
            _first(record, *names) for names in (("problem", "Problem"), ("answer", "Answer", "expected_answer"))
        )
        name = str(record.get("unique_id", record.get("id", record.get("ID", number))))
        return Item(name, "", f"{problem}\n\n{REASON}", {"answer": answer})

    def check(self) -> None:
        """LaTeX is compared by math-verify."""
        if not self.integer:
            same_math("1", "1")

    def score(self, item: Item, output: str, ask: Ask | None = None) -> dict[str, float]:
        r"""Return the last \boxed{} against the gold answer: as whole numbers, or as mathematics."""
        given, gold = boxed(output), item.gold["answer"]
        if given is None:
            return {"score": 0.0, "answered": 0.0}
        if self.integer:
            value = number(given.replace("\\", "").replace(" ", ""))
            return {"score": float(value is not None and value == number(gold)), "answered": 1.0}
        return {"score": float(same_math(gold, given)), "answered": 1.0}


def _first(record: Record, *names: str) -> str:
    for name in names:
        if name in record:
            return str(record[name]).strip()
    raise KeyError(names[0])


MATH500 = Competition("math500", LONG, ("HuggingFaceH4/MATH-500", None, "test"), "test")
AIME24 = Competition("aime24", LONG, ("Maxwell-Jia/AIME_2024", None, "train"), "aime24", integer=True)
AIME25 = Competition("aime25", LONG, ("math-ai/aime25", None, "test"), "aime25", integer=True)
