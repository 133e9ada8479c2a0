"""What experiments are run with: a model, data, and the results so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kvthaw.bench.settings import setting
from kvthaw.engine.hf import PreTrainedModel
from kvthaw.errors import ConfigError
from kvthaw.evaluate.job import Progress
from kvthaw.evaluate.machine import identity
from kvthaw.evaluate.published import BENCHMARKS, Benchmark, Item
from kvthaw.evaluate.results import ResultsFile
from kvthaw.evaluate.variant import FULL, Variant
from kvthaw.reproduce.stand_ins import records

SHRINK = 16
"""By what --quick divides budgets."""
Load = Callable[[str], tuple[PreTrainedModel, Any]]


@dataclass
class Lab:
    """name: of the model. load: brings model and tokenizer when they are first needed. data: a file or folder of published data, or
    "hub"; text: a book instead of the one that ships. quick: everything as small as it can be. limit: of a benchmark's questions."""

    name: str | None
    load: Load
    results: ResultsFile = field(default_factory=ResultsFile)
    data: str | None = None
    text: str | None = None
    quick: bool = False
    limit: int | None = None
    tell: Callable[[Progress], None] = lambda progress: None
    note: Callable[[str], None] = lambda text: None

    @cached_property
    def loaded(self) -> tuple[PreTrainedModel, Any]:
        """Model and tokenizer. Raises ConfigError where none was named."""
        if self.name is None:
            raise ConfigError("this needs the weights of a model, the paper's for comparable numbers: --model NAME, or --quick")
        return self.load(self.name)

    @cached_property
    def same(self) -> dict[str, str]:
        """What results depend on besides the experiment."""
        return identity(self.loaded[0], self.name or "")

    @property
    def on(self) -> str:
        """The model, its type and its device."""
        return f"{Path(self.name or '').name}, {self.same['dtype']}, {self.same['device']}"

    def variant(self, row: str) -> Variant:
        """Return the variant of a row such as "pqcache:budget=0.2", smaller if quick."""
        asked = setting(row, shape="tiny", steps="eager", length=2, batch=1, budget=None, retrieved=None, dense_layers=None,
                        new_tokens=2, seed=0, device="")  # fmt: skip
        variant = Variant(asked.method, asked.budget, asked.retrieved, asked.dense_layers)
        return FULL if asked.dense else self.shrunk(variant)

    def shrunk(self, variant: Variant) -> Variant:
        """Return the variant, with a small budget if quick."""
        if not self.quick or isinstance(variant.budget, float):
            return variant
        asked = variant.budget or variant.retrieved or 256
        return replace(variant, budget=min(128, max(48, int(asked) // SHRINK)), retrieved=None, dense_layers=0)

    def items(self, benchmark: Benchmark) -> list[Item]:
        """Return a benchmark's questions, one that ships in its place if quick."""
        if self.quick:
            return benchmark.items(records(benchmark.name))
        return benchmark.load(self.data)[: self.limit]

    def benchmark(self, name: str) -> Benchmark:
        """Return a benchmark by name."""
        return BENCHMARKS[name]
