"""Key-value records with a question for one value: LongEval's lines (LMSYS, 2023) and key-value retrieval (Liu et al., 2023,
"Lost in the Middle")."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvthaw.evaluate.files import read_records

from .base import FromFile, Sample, Whole, ahead, depth_of, distinct, fit, prompts, uuid, word_key

LINES_INTRO, LINE, LINES_QUESTION = prompts("longeval")
JSON_INTRO, JSON_QUESTION = prompts("kv_retrieval")


@dataclass(frozen=True)
class Keyed(Whole, ABC):
    """As many records as the length has room for; the unit is a record.

    question: for a key, as published.
    """

    name: str
    max_new_tokens: int
    question: str
    stops: tuple[str, ...] = ("\n",)

    @abstractmethod
    def make_pairs(self, n: int, seed: int) -> list[tuple[str, str]]:
        """`n` records, keys and values; no key twice."""

    @abstractmethod
    def write(self, records: Sequence[tuple[str, str]]) -> tuple[str, list[str]]:
        """Return the published context over the records, and each record's text within it."""

    def ask(self, records: Sequence[tuple[str, str]], asked: int, spare: str = "") -> Sample:
        """Return the published prompt over the records, `spare` before it, asking for the one at index `asked`."""
        text, parts = self.write(records)
        context, (key, value) = ahead(spare, text), records[asked]
        return Sample(context, self.question.format(key=key), (value,), depth_of(context, parts[asked]))

    def with_records(self, n: int, seed: int, depth: float, spare: str = "") -> Sample:
        """Return a sample of `n` records of any length in tokens."""
        return self.ask(self.make_pairs(n, seed), min(n - 1, round(depth * (n - 1))), spare)

    def sample(self, tokenizer: Any, *, length: int, seed: int, depth: float | None = None, text: str | None = None) -> Sample:
        """See Task.sample; `text` has no use here."""
        at = random.Random(seed).random() if depth is None else depth
        return fit(tokenizer, length, lambda n, spare: self.with_records(n + 1, seed, at, spare))


@dataclass(frozen=True)
class LongEval(Keyed):
    """What is the register's content in line X? The published files have 200 to 1350 lines."""

    name: str = "longeval"
    max_new_tokens: int = 8
    question: str = LINES_QUESTION

    def make_pairs(self, n: int, seed: int) -> list[tuple[str, str]]:
        """See Keyed; an adjective and a noun, and a number up to 50,000."""
        rng = random.Random(f"{seed} lines")
        return [(key, str(rng.randint(1, 50000))) for key in distinct(rng, word_key, n)]

    def write(self, records: Sequence[tuple[str, str]]) -> tuple[str, list[str]]:
        lines = [LINE.format(key=key, value=value) for key, value in records]
        return LINES_INTRO + "".join(lines), lines

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


@dataclass(frozen=True)
class KVRetrieval(Keyed):
    """A JSON object of UUIDs: what is the value of this key? The published files have 75, 140 or 300 records."""

    name: str = "kv_retrieval"
    max_new_tokens: int = 44
    question: str = JSON_QUESTION

    def make_pairs(self, n: int, seed: int) -> list[tuple[str, str]]:
        """See Keyed; UUIDs."""
        rng = random.Random(f"{seed} records")
        return [(key, uuid(rng)) for key in distinct(rng, uuid, n)]

    def write(self, records: Sequence[tuple[str, str]]) -> tuple[str, list[str]]:
        lines = [f'"{key}": "{value}"' for key, value in records]
        return JSON_INTRO + "{" + ",\n ".join(lines) + "}", lines

    def reading(self, path: Path) -> FromFile:
        """See Reads; a published file, `kv-retrieval-75_keys.jsonl.gz` and its like, in the published prompt."""
        return FromFile.of(self, map(self._read, read_records(path, "ordered_kv_records")))

    def _read(self, record: dict[str, Any]) -> Sample:
        records = [(key, value) for key, value in record["ordered_kv_records"]]
        return self.ask(records, [key for key, _ in records].index(record["key"]))


GENERATORS = (LongEval(), KVRetrieval())
