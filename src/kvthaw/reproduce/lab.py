"""What experiments are run with: a model, data, and the results so far."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kvthaw.bench.card import where
from kvthaw.bench.decode import Bench
from kvthaw.engine.hf import PreTrainedModel
from kvthaw.errors import ConfigError
from kvthaw.evaluate.job import Progress
from kvthaw.evaluate.machine import identity
from kvthaw.evaluate.published import Benchmark, Item
from kvthaw.evaluate.results import ResultsFile
from kvthaw.evaluate.tasks.base import read_asset
from kvthaw.evaluate.text import Chat
from kvthaw.evaluate.variant import FULL, Variant, read_variant

BUDGET = 64
"""Of all quick runs."""
Load = Callable[[str], tuple[PreTrainedModel, Any]]


class _Unchecked(Bench):
    """Times without comparing with transformers first."""

    checks = staticmethod(lambda model, forwards: lambda setting: None)


@dataclass
class Lab:
    """name: of the model. load: brings model and tokenizer when they are first needed. data: a file or folder of published data, or
    "hub". text: a book instead of the one that ships. quick: run everything as small as it can be. limit: of a benchmark's
    questions, or a task's samples. host_bytes: most host memory for KV where shapes are timed; None: as much as is free. known: of
    times, show what the results hold of a GPU of this name, and measure none."""

    name: str | None
    load: Load
    results: ResultsFile = field(default_factory=ResultsFile)
    data: str | None = None
    text: str | None = None
    quick: bool = False
    limit: int | None = None
    host_bytes: int | None = None
    known: str | None = None
    tell: Callable[[Progress], None] = lambda progress: None
    note: Callable[[str], None] = lambda text: None

    @cached_property
    def loaded(self) -> tuple[PreTrainedModel, Any]:
        """Model and tokenizer. Raises ConfigError where none was named."""
        if self.name is None:
            raise ConfigError("this needs the weights of a model, the paper's for comparable numbers: --model NAME, or --quick")
        return self.load(self.name)

    @property
    def timed_on(self) -> str:
        """The name of the device whose times are asked for."""
        return self.known or where()[1]

    @property
    def gpu(self) -> bool:
        """Whether that is a GPU."""
        return self.known is not None or where()[0].type == "cuda"

    @cached_property
    def bench(self) -> Bench:
        """The decode benchmark, over the lab's results. Experiments share its model and what it has checked."""

        def watch(what: str, done: int, of: int) -> None:
            self.tell(Progress(done, of, 0, 0, what))

        kind = _Unchecked if self.quick else Bench
        return kind(self.results, host_bytes=self.host_bytes, watch=watch, note=lambda text: self.note(text))

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
        asked = read_variant(row)
        return asked if asked == FULL else self.shrunk(asked)

    def shrunk(self, variant: Variant) -> Variant:
        """Return the variant, with BUDGET if quick."""
        if not self.quick or isinstance(variant.budget, float):
            return variant
        return replace(variant, budget=BUDGET, retrieved=None, dense_layers=0)

    def items(self, benchmark: Benchmark) -> list[Item]:
        """Return a benchmark's questions, one that ships in its place if quick."""
        if self.quick:
            return benchmark.items([_stand_in(benchmark.name)])
        return benchmark.load(self.data)[: self.limit]

    def chat(self, benchmark: Benchmark) -> Chat | None:
        """Return the model's chat template, if it has one and the benchmark is asked through one."""
        asked = benchmark.generation.chat and getattr(self.loaded[1], "chat_template", None) is not None
        return Chat() if asked else None


def _stand_in(benchmark: str) -> dict[str, Any]:
    """Return a record in the layout of a benchmark's file, not the benchmark's own, for runs that only show that all works."""
    known = json.loads(read_asset("stand_ins.json"))
    return next(record for prefix, record in known.items() if benchmark.startswith(prefix))
