"""LongBench v2 (Bai et al., 2024): multiple choice over contexts of 8k to 2M words, with the authors' prompts and extraction."""

from __future__ import annotations

from dataclasses import dataclass

from lab.evaluate.tasks.base import prompts

from .answers import choice
from .base import Ask, Benchmark, Generation, Item, Record

TEXT, CHOICES, FORMAT, STEPS, AGAIN, FINAL = prompts("longbench_v2")
PATTERNS = (r"The correct answer is \(([A-D])\)", r"The correct answer is ([A-D])")
ANSWER = Generation(128, temperature=0.1)
REASONING = Generation(1024, temperature=0.1)


@dataclass(frozen=True)
class LongBenchV2(Benchmark):
    """`steps`: reason first (up to 1024 tokens), then answer in a second prompt that holds the reasoning and omits the text.

    A prompt longer than `--length` is cut in the middle, half head and half tail, as published.
    """

    steps: bool = False

    def item(self, record: Record, number: int) -> Item:
        """Fields: context, question, choice_A to choice_D, answer; _id, domain, difficulty and length if there."""
        fields = {name: str(record[name]).strip() for name in ("question", "choice_A", "choice_B", "choice_C", "choice_D")}
        asked = CHOICES.format(**fields)
        context = TEXT.format(question="questions" if self.steps else "question", context=str(record["context"]).strip())
        gold = {"answer": str(record["answer"]).strip(), "choices": asked}
        gold |= {name: record[name] for name in ("domain", "difficulty", "length") if name in record}
        return Item(str(record.get("_id", number)), context, f"{asked}\n\n{STEPS if self.steps else FORMAT}", gold)

    def follow_up(self, item: Item, output: str) -> tuple[str, Generation] | None:
        """Return the prompt that asks for the letter after the reasoning."""
        if not self.steps:
            return None
        return f"{AGAIN}{item.gold['choices']}\n\n{STEPS} {output.strip()}\n\n{FINAL}", ANSWER

    def score(self, item: Item, output: str, ask: Ask | None = None) -> dict[str, float]:
        """Score the letter after "The correct answer is", overall and within the item's difficulty, length and both."""
        letter = choice(output.replace("*", ""), PATTERNS)
        right = float(letter == item.gold["answer"])
        kinds = [str(item.gold[name]) for name in ("difficulty", "length") if name in item.gold]
        parts = dict.fromkeys([*kinds, " ".join(kinds)] if kinds else [], right)
        return {"score": right, "answered": float(letter is not None), **parts}


HUB = ("zai-org/LongBench-v2", None, "train")
V2 = (
    LongBenchV2("longbench_v2", ANSWER, HUB, "longbench_v2"),
    LongBenchV2("longbench_v2_cot", REASONING, HUB, "longbench_v2", steps=True),
)
