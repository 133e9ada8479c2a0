"""GSM8K (Cobbe et al., 2021) with the eight worked examples of chain-of-thought prompting (Wei et al., 2022)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache

from lab.evaluate.assets import read_own

from .answers import last_number, number
from .base import Ask, Benchmark, Generation, Item, Record

_STATED = re.compile(r"The answer is \$?(-?[0-9.,]+)")


@dataclass(frozen=True)
class Gsm8k(Benchmark):
    """Grade-school word problems.

    `score` compares the number after "The answer is", `flexible` the last number of the answer.

    Prompt and stops equal lm-evaluation-harness's gsm8k_cot. The examples are the context.
    """

    def item(self, record: Record, number: int) -> Item:
        """Fields: question, answer (whose last line is #### and the number)."""
        gold = str(record["answer"]).rpartition("####")[2].strip()
        return Item(str(number), examples(), f"Q: {record['question']}\nA:", {"answer": gold})

    def score(self, item: Item, output: str, ask: Ask | None = None) -> dict[str, float]:
        """Equal as numbers, so that 18, 18.00 and $18 are one."""
        gold, stated = number(item.gold["answer"]), _STATED.search(output)
        if gold is None:
            raise ValueError(f"the answer {item.gold['answer']!r} of item {item.id} is no number")
        strict = stated is not None and number(stated.group(1)) == gold
        return {"score": float(strict), "flexible": float(last_number(output) == gold)}


@cache
def examples() -> str:
    """Return the eight worked examples, each ending in a blank line."""
    shots = json.loads(read_own("gsm8k_cot.json"))
    return "".join(f"Q: {shot['question']}\nA: {shot['target']}\n\n" for shot in shots)


GSM8K = Gsm8k("gsm8k", Generation(256, ("Q:", "</s>", "<|im_end|>"), chat=False), ("openai/gsm8k", "main", "test"))
