"""Records of a key and a value each, of which one is asked for: LongEval's lines, and key-value retrieval."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from .base import Sample, Whole, ahead, depth_of, fit


class Keyed(Whole, ABC):
    """As many records as the length has room for; the unit is a record."""

    @abstractmethod
    def make_pairs(self, n: int, seed: int) -> list[tuple[str, str]]:
        """`n` records, keys and values; no key twice."""

    @abstractmethod
    def write(self, records: Sequence[tuple[str, str]]) -> tuple[str, list[str]]:
        """Return the published context over the records, and each as it stands there."""

    @abstractmethod
    def question(self, key: str) -> str:
        """Return the published question for a key."""

    def ask(self, records: Sequence[tuple[str, str]], asked: int, spare: str = "") -> Sample:
        """Return the published prompt over the records, `spare` before it, asking for the one at index `asked`."""
        text, parts = self.write(records)
        context, (key, value) = ahead(spare, text), records[asked]
        return Sample(context, self.question(key), (value,), depth_of(context, parts[asked]))

    def with_records(self, n: int, seed: int, depth: float, spare: str = "") -> Sample:
        """Return a sample of `n` records, whatever its length in tokens."""
        return self.ask(self.make_pairs(n, seed), min(n - 1, round(depth * (n - 1))), spare)

    def sample(self, tokenizer: Any, *, length: int, seed: int, depth: float | None = None, text: str | None = None) -> Sample:
        """See Task.sample; `text` has no use here."""
        at = random.Random(seed).random() if depth is None else depth
        return fit(tokenizer, length, lambda n, spare: self.with_records(n + 1, seed, at, spare))
