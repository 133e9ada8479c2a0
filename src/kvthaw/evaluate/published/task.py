"""A published benchmark as a task of the common runner: one greedy answer a question, with all that compares tasks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvthaw.errors import ConfigError
from kvthaw.evaluate.tasks.base import Sample, Task

from . import BENCHMARKS
from .base import Benchmark, Item, truncate


@dataclass(frozen=True)
class Questions:
    """Sample i is question i, its prompt cut in the middle to the length asked for; the benchmark's own score.

    Greedy and without chat template or judge; `kvthaw eval NAME` has those, several answers a question, and what asks twice.
    """

    benchmark: Benchmark
    items: tuple[Item, ...] = ()

    @property
    def name(self) -> str:
        """The benchmark's."""
        return self.benchmark.name

    @property
    def max_new_tokens(self) -> int:
        """The benchmark's."""
        return self.benchmark.generation.max_new_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """The benchmark's."""
        return self.benchmark.generation.stops

    def reading(self, path: Path) -> Task:
        """See kvthaw.evaluate.tasks.Reads; raises ConfigError for a benchmark that asks twice, too."""
        items = tuple(self.benchmark.load(str(path)))
        if self.benchmark.follow_up(items[0], "") is not None:
            raise ConfigError(f"{self.name} asks a second prompt, which only kvthaw eval {self.name} does")
        return Questions(self.benchmark, items)

    def sample(self, tokenizer: Any, *, length: int, seed: int, depth: float | None = None, text: str | None = None) -> Sample:
        """Question number `seed`. Raises ValueError for one that is not there, ConfigError before any were read."""
        if not self.items:
            self.benchmark.load(None)
        if not 0 <= seed < len(self.items):
            raise ValueError(f"{self.name} has {len(self.items)} questions here, from 0 on; there is no question {seed}")
        item = truncate(tokenizer, self.items[seed], length)
        return Sample(item.context, item.question, (json.dumps(item.gold, ensure_ascii=False),), None)

    def score(self, sample: Sample, output: str) -> float:
        """Return the benchmark's."""
        item = Item("", sample.context, sample.question, json.loads(sample.answers[0]))
        return self.benchmark.score(item, output)["score"]


QUESTIONS: dict[str, Task] = {name: Questions(benchmark) for name, benchmark in BENCHMARKS.items()}
"""BENCHMARKS as tasks that have read nothing yet."""
