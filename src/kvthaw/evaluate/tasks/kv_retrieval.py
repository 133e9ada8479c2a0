"""Key-value retrieval (Liu et al., 2023, "Lost in the Middle"): a JSON object of UUIDs; what is the value of this key?"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .base import FromFile, Sample, Task, ahead, depth_of, distinct, fit, read_records, score_answers, uuid

INTRO = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"
QUESTION = '\n\nKey: "{key}"\nCorresponding value:'


def make(records: list[tuple[str, str]], asked: int, spare: str = "") -> Sample:
    """The published prompt over `records` (key, value), `spare` before it, asking for the one at index `asked`."""
    lines = [f'"{key}": "{value}"' for key, value in records]
    context = ahead(spare, INTRO + "{" + ",\n ".join(lines) + "}")
    key, value = records[asked]
    return Sample(context, QUESTION.format(key=key), (value,), depth_of(context, lines[asked]))


@dataclass(frozen=True)
class KVRetrieval:
    """Records until the length is reached; in the published files 75, 140 or 300."""

    name: str = "kv_retrieval"
    max_new_tokens: int = 44
    stops: tuple[str, ...] = ("\n",)

    def sample(self, tokenizer: Any, *, length: int, seed: int, depth: float | None = None, text: str | None = None) -> Sample:
        """See Task.sample; the unit is a record, `text` has no use here."""
        at = random.Random(seed).random() if depth is None else depth
        return fit(tokenizer, length, lambda n, spare: self.with_records(n + 1, seed, at, spare))

    def with_records(self, n: int, seed: int, depth: float, spare: str = "") -> Sample:
        """A sample of `n` records, whatever its length in tokens."""
        rng = random.Random(f"{seed} records")
        records = [(key, uuid(rng)) for key in distinct(rng, uuid, n)]
        return make(records, min(n - 1, round(depth * (n - 1))), spare)

    def load(self, path: Path) -> list[Sample]:
        """The samples of a published file, `kv-retrieval-75_keys.jsonl.gz` and its like, in the published prompt."""
        return [self._read(record) for record in read_records(path, "ordered_kv_records")]

    def reading(self, path: Path) -> Task:
        """See Reads; a published file."""
        return FromFile(self, tuple(self.load(path)))

    def score(self, sample: Sample, output: str) -> float:
        """1 if the value stands in the output whole."""
        return score_answers(sample, output)

    @staticmethod
    def _read(record: dict[str, Any]) -> Sample:
        records = [(key, value) for key, value in record["ordered_kv_records"]]
        return make(records, [key for key, _ in records].index(record["key"]))


GENERATORS = (KVRetrieval(),)
