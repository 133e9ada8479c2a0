"""Key-value retrieval (Liu et al., 2023, "Lost in the Middle"): a JSON object of UUIDs; what is the value of this key?"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .base import FromFile, Sample, distinct, prompts, read_records, uuid
from .keyed import Keyed

INTRO, QUESTION = prompts("kv_retrieval")


@dataclass(frozen=True)
class KVRetrieval(Keyed):
    """Records until the length is reached; in the published files 75, 140 or 300."""

    name: str = "kv_retrieval"
    max_new_tokens: int = 44
    stops: tuple[str, ...] = ("\n",)

    def make_pairs(self, n: int, seed: int) -> list[tuple[str, str]]:
        """See Keyed; UUIDs."""
        rng = random.Random(f"{seed} records")
        return [(key, uuid(rng)) for key in distinct(rng, uuid, n)]

    def write(self, records: Sequence[tuple[str, str]]) -> tuple[str, list[str]]:
        lines = [f'"{key}": "{value}"' for key, value in records]
        return INTRO + "{" + ",\n ".join(lines) + "}", lines

    def question(self, key: str) -> str:
        return QUESTION.format(key=key)

    def reading(self, path: Path) -> FromFile:
        """See Reads; a published file, `kv-retrieval-75_keys.jsonl.gz` and its like, in the published prompt."""
        return FromFile.of(self, map(self._read, read_records(path, "ordered_kv_records")))

    def _read(self, record: dict[str, Any]) -> Sample:
        records = [(key, value) for key, value in record["ordered_kv_records"]]
        return self.ask(records, [key for key, _ in records].index(record["key"]))


GENERATORS = (KVRetrieval(),)
