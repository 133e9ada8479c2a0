"""Plans over the decode benchmark: times and memory of a shape with random weights, which need no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvthaw.bench.settings import possible
from kvthaw.errors import ConfigError
from kvthaw.evaluate.results import Record
from lab.bench.settings import ShapeSetting, setting
from lab.reproduce.experiment import Cell, Cells
from lab.reproduce.lab import BUDGET, Lab

MEASURES: dict[str, Callable[[Record], float]] = {
    "ttft": lambda record: record["ttft_s"],
    "tt2t": lambda record: record["tt2t_s"],
    "tpot": lambda record: record["tpot_s"],
    "tpot-ms": lambda record: 1e3 * record["tpot_s"],
    "throughput": lambda record: record["tokens_per_s"],
    "memory": lambda record: (record["kv_device_bytes"] + record["index_device_bytes"] + record["kv_dense_bytes"]) / 2**20,
    "total": lambda record: _total(record, record["new_tokens"]),
    "total-256": lambda record: _total(record, 256),
    "total-512": lambda record: _total(record, 512),
    "hits": lambda record: 100 * (record["hit_rate"] or 0.0),
    "index-%": lambda record: 100 * (record["tt2t_s"] - record["ttft_s"] - record["itl_p50_s"]) / record["ttft_s"],
    "amortised-%": lambda record: 100 * (record["tpot_s"] / record["itl_p50_s"] - 1),
    "refresh-%": lambda record: 12800 * (record["tpot_s"] / record["itl_p50_s"] - 1),
}
"""What is read of a record.

total: until the last token, or the 256th or 512th of more.
index-%: the time from the first token to the second, less a step, as a share of the prefill.
amortised-%: what a mean step takes over the median one.
refresh-%: the same, if one step in 128 took all of it.
"""


_OF_STEPS = ("tpot", "tpot-ms", "throughput", "memory", "hits", "amortised-%", "refresh-%")
"""Measures that need no warm prompt."""


def _total(record: Record, steps: int) -> float:
    return float(record["ttft_s"] + record["elapsed_s"].get(str(steps), record["new_tokens"] * record["tpot_s"]))


class Timing(NamedTuple):
    """A measure of MEASURES after a prompt of `length` tokens in each row of a batch, over `new_tokens` steps."""

    length: int
    measure: str
    batch: int = 1
    new_tokens: int = 128


@dataclass(frozen=True)
class Timed:
    """Runs of the decode benchmark after a prefill of random tokens.

    steps: how they are taken; eager where that cannot be.
    """

    columns: Mapping[str, Timing]
    shape: str = "llama-3.1-8b"
    steps: str = "captured"
    needs: str = "a GPU"

    def measure(self, lab: Lab, rows: Sequence[str]) -> Cells:
        if not (lab.quick or lab.gpu):
            raise ConfigError(
                f"this times the shape {self.shape} on a GPU, but this machine has no GPU; --quick runs a tiny shape"
            )
        asked = {(row, column): self._setting(lab, row, timing) for row in rows for column, timing in self.columns.items()}
        if lab.known is None:
            lab.bench.run(sorted(dict.fromkeys(asked.values()), key=lambda one: one.length * one.batch))
        if lab.quick:
            lab.bench.judge()  # at full size what one run fails with is noted, and the others count
        cells: Cells = {}
        for (row, column), one in asked.items():
            record = lab.results.get(one.to_dict())
            if record is not None:
                cells[row, column] = Cell(MEASURES[self.columns[column].measure](record), _on(one))
        return cells

    def _setting(self, lab: Lab, row: str, timing: Timing) -> ShapeSetting:
        common = {"budget": 256, "retrieved": None, "dense_layers": None, "seed": 0, "device": lab.timed_on}
        sizes = {"shape": self.shape, "length": timing.length, "batch": timing.batch, "new_tokens": timing.new_tokens}
        if lab.quick:
            sizes = {"shape": "tiny", "length": 160, "batch": min(2, timing.batch), "new_tokens": 2}
        one = setting(row, steps=self.steps, **sizes, **common)
        if lab.quick and not one.dense:
            one = replace(one, budget=BUDGET, retrieved=None, dense_layers=0)
        one = one if possible(one, lab.gpu) else replace(one, steps="eager")
        cold = not lab.quick and all(each.measure in _OF_STEPS for each in self.columns.values())
        return replace(one, prompt="once") if cold and lab.results.get(one.to_dict()) is None else one


def _on(one: ShapeSetting) -> str:
    return f"shape {one.shape} with random weights, {one.device}, {one}"
