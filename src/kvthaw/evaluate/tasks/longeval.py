"""LongEval's lines (LMSYS, 2023): what is the register's content in line X?"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .base import FromFile, Sample, depth_of, distinct, prompts, read_records, word_key
from .keyed import Keyed

INTRO, LINE, QUESTION = prompts("longeval")


@dataclass(frozen=True)
class LongEval(Keyed):
    """Lines until the length is reached; in the published files 200 to 1350."""

    name: str = "longeval"
    max_new_tokens: int = 8
    stops: tuple[str, ...] = ("\n",)

    def make_pairs(self, n: int, seed: int) -> list[tuple[str, str]]:
        """See Keyed; an adjective and a noun, and a number up to 50,000."""
        rng = random.Random(f"{seed} lines")
        return [(key, str(rng.randint(1, 50000))) for key in distinct(rng, word_key, n)]

    def write(self, records: Sequence[tuple[str, str]]) -> tuple[str, list[str]]:
        lines = [LINE.format(key=key, value=value) for key, value in records]
        return INTRO + "".join(lines), lines

    def question(self, key: str) -> str:
        return QUESTION.format(key=key)

    def reading(self, path: Path) -> FromFile:
        """See Reads; a published file, `200_lines.jsonl` and its like (gzip too), prompts byte for byte."""
        return FromFile.of(self, map(self._read, read_records(path, "expected_number")))

    @staticmethod
    def _read(record: dict[str, Any]) -> Sample:
        prompt: str = record["prompt"]
        cut = prompt.rindex("\nNow the record is over.")
        context = prompt[:cut]
        depth = depth_of(context, record["correct_line"])
        return Sample(context, prompt[cut:], (str(record["expected_number"]),), depth)


GENERATORS = (LongEval(),)
