"""What experiments are run with: a model, data, and the results so far."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kvthaw.engine.chat_template import Chat
from kvthaw.engine.hf import PreTrainedModel
from kvthaw.errors import ConfigError, HostMemoryError
from kvthaw.evaluate.evaluator import Progress
from kvthaw.evaluate.machine import identity, where
from kvthaw.evaluate.results import ResultsFile
from kvthaw.evaluate.variant import FULL, Variant, read_variant
from lab.bench.shaped import ShapeBench
from lab.evaluate.assets import read_own
from lab.evaluate.published import Benchmark, Item

BUDGET = 64
"""Of all quick runs."""
Load = Callable[[str], tuple[PreTrainedModel, Any]]


class _Unchecked(ShapeBench):
    """Times without comparing with transformers first."""

    checks = staticmethod(lambda model: lambda setting: None)


@dataclass
class Lab:
    """name: of the model.

    load: brings model and tokenizer when they are first needed.
    data: a file or folder of published data, or "hub".
    text: a book instead of the one that ships.
    quick: run everything as small as it can be.
    limit: of a benchmark's questions, or a task's samples.
    host_bytes: most host memory for KV where shapes are timed; None: as much as is free.
    known: of times, show what the results hold of a GPU of this name, and measure none.
    left_out: sentences on columns that were.
    """

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
    left_out: list[str] = field(default_factory=list)
    _items: dict[str, list[Item]] = field(default_factory=dict)

    @contextmanager
    def attempt(self, columns: Iterable[str]) -> Iterator[None]:
        """Leave columns out, with a sentence, that the model's positions or the host's memory cannot take."""
        try:
            yield
        except (ConfigError, HostMemoryError) as error:
            self.left_out.append(f"{', '.join(columns)} left out: {error}")
            self.note(self.left_out[-1])

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
    def bench(self) -> ShapeBench:
        """The decode benchmark, over the lab's results. Experiments share its model and what it has checked."""

        def watch(what: str, done: int, of: int) -> None:
            self.tell(Progress(done, of, 0, 0, what))

        kind = _Unchecked if self.quick else ShapeBench
        return kind(self.results, host_bytes=self.host_bytes, watch=watch, note=lambda text: self.note(text))

    @cached_property
    def same(self) -> dict[str, str]:
        """What results depend on besides the experiment."""
        return identity(self.loaded[0], self.name or "")

    @property
    def on(self) -> str:
        """The model, its type and its device."""
        return f"{Path(self.name or '').name}, {self.same['dtype']}, {self.same['device']}"

    def variant(self, row: str, *, each_head: bool = False) -> Variant:
        """Return the variant of a row such as "pqcache:budget=0.2", smaller if quick.

        each_head: the row's budget is of each query head where the method's heads of a KV head can choose apart, see
            `apart`.
        """
        asked = read_variant(row)
        small = asked if asked == FULL else self.shrunk(asked)
        return self.apart(small) if each_head else small

    def apart(self, variant: Variant) -> Variant:
        """Return an IceCache whose budget is of each query head, as its paper counts.

        It has the regions of that budget. Every query head of a KV head selects the budget's remaining rows, and the union is not
        cut. The regions of a fraction are of the whole.
        """
        method, config = variant.resolved, self.loaded[0].config.get_text_config(decoder=True)
        if not variant.method.startswith("icecache") or variant.budget is None:
            return variant
        group = config.num_attention_heads // (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        name = f"{variant.method}:merge=each"
        if isinstance(variant.budget, float):
            return replace(variant, method=name, budget=min(0.99, group * variant.budget))
        regions = method.regions.for_budget(variant.budget)
        kept = f"sink={regions.sink}:window={regions.window}:buffer={regions.buffer}"
        return replace(variant, method=f"{name}:{kept}", budget=None, retrieved=group * (variant.budget - regions.held))

    def shrunk(self, variant: Variant) -> Variant:
        """Return the variant, with BUDGET if quick."""
        if not self.quick or isinstance(variant.budget, float):
            return variant
        return replace(variant, budget=BUDGET, retrieved=None, dense_layers=0)

    def items(self, benchmark: Benchmark) -> list[Item]:
        """Return a benchmark's questions, one that ships in its place if quick."""
        if self.quick:
            return benchmark.items([_stand_in(benchmark.name)])
        if benchmark.name not in self._items:
            self._items[benchmark.name] = benchmark.load(self.data)
        return self._items[benchmark.name][: self.limit]

    def chat(self, benchmark: Benchmark) -> Chat | None:
        """Return the model's chat template, if it has one and the benchmark is asked through one."""
        asked = benchmark.generation.chat and getattr(self.loaded[1], "chat_template", None) is not None
        return Chat() if asked else None


def _stand_in(benchmark: str) -> dict[str, Any]:
    """Return a record in the layout of a benchmark's file, not the benchmark's own, for runs that only show that all works."""
    known = json.loads(read_own("stand_ins.json"))
    return next(record for prefix, record in known.items() if benchmark.startswith(prefix))
