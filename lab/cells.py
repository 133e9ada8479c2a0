"""Comparisons as they are kept in lab/results: a line a cell, all samples of a task at one length under one variant."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from kvthaw.errors import ConfigError
from kvthaw.evaluate.results import Record, ResultsFile, mean
from lab.evaluate.metrics import wilson

T = TypeVar("T")
_MEANS = ("attended_mean", "retrieved", "hit_rate", "attention_mass", "recall_at_k", "output_error")
_KEY = ("about", "task", "length", "question", "method", "budget", "retrieved", "dense_layers")
_ABOUT = ("model", "weights", "dtype", "device", "kvthaw", "source")
_EACH = ("nll", "attended_mean", "attended_max", "seconds")
"""What each record of perplexity has of its own, beside where it begins."""


@dataclass(frozen=True)
class Cell:
    """The samples of a task at a length under one method, budget and protocol.

    scores: accuracy by (seed, depth). means: over the samples that have the value, None where none has. Bytes are the most of a
    sample, of all layers together.
    """

    about: tuple[str, ...]
    task: str
    length: int
    question: str
    method: str
    budget: int | float | None
    retrieved: int | None
    dense_layers: int
    scores: dict[tuple[int, float | None], float]
    kv_device_bytes: int
    kv_host_bytes: int
    means: dict[str, float | None]

    @property
    def asked(self) -> tuple[Any, ...]:
        """What was asked of which model, machine and version aside: a newer cell takes its place."""
        about = zip(_ABOUT, self.about, strict=True)
        return *(value for name, value in about if name not in ("device", "kvthaw")), *(
            getattr(self, name) for name in _KEY[1:]
        )

    @cached_property
    def accuracy(self) -> float:
        """The mean score."""
        return sum(self.scores.values()) / len(self.scores)

    @property
    def n(self) -> int:
        """How many samples."""
        return len(self.scores)

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the accuracy."""
        return wilson(self.accuracy, self.n)

    @property
    def full(self) -> bool:
        """Whether it is full attention's."""
        return self.method == "full"

    def to_json(self) -> str:
        """One line of JSON."""
        record = {**dict(zip(_ABOUT, self.about, strict=True)), **asdict(replace(self, about=()))}
        del record["about"]
        record["scores"] = [[seed, depth, _short(score)] for (seed, depth), score in self.scores.items()]
        record["means"] = {name: None if value is None else round(value, 6) for name, value in self.means.items()}
        return json.dumps(record, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Cell:
        """The reverse. Raises ValueError, KeyError or TypeError for anything else."""
        record: dict[str, Any] = json.loads(text)
        about = tuple(record.pop(name) for name in _ABOUT)
        scores = {(seed, depth): float(score) for seed, depth, score in record.pop("scores")}
        return Cell(about=about, scores=scores, **record)


def _short(score: float) -> float:
    """0 and 1 without a point: there are a hundred thousand of them."""
    return int(score) if score in (0, 1) else round(score, 6)


def cells_of(records: Iterable[Record]) -> list[Cell]:
    """Records of tasks by cell. A sample that was run twice, with selections observed and without, counts once."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        if "task" in record.setting:
            about = tuple(record.setting[name] for name in _ABOUT)
            groups.setdefault((about, *(record.setting[name] for name in _KEY[1:])), []).append(record)
    return [
        Cell(
            **dict(zip(_KEY, key, strict=True)),
            scores={(one["seed"], one["depth"]): one["accuracy"] for one in some},
            kv_device_bytes=max(one["kv_device_bytes"] + one["kv_dense_bytes"] for one in some),
            kv_host_bytes=max(one["kv_host_bytes"] for one in some),
            means={name: mean(one[name] for one in some) for name in _MEANS},
        )
        for key, some in groups.items()
    ]


def read_cells(path: Path) -> list[Cell]:
    """The cells of a folder of python -m lab compare, or of a file that `write_cells` wrote. Raises ConfigError without any."""
    cells = _parsed(path, Cell.from_json) if path.is_file() else cells_of(ResultsFile(path / "results.jsonl"))
    if not cells:
        raise ConfigError(f"{str(path)!r} holds no results of python -m lab compare")
    return cells


def write_cells(cells: Iterable[Cell], path: Path) -> None:
    """One line a cell."""
    path.write_text("".join(cell.to_json() + "\n" for cell in cells), encoding="utf-8")


def records_of(cells: Iterable[Cell]) -> list[Record]:
    """A record a sample, for the report of python -m lab compare; what was measured is the mean of the cell's."""
    found = []
    for cell in cells:
        about = dict(zip(_ABOUT, cell.about, strict=True))
        setting = {**about, **{name: getattr(cell, name) for name in _KEY[1:]}, "probe": 0}
        bytes_ = {"kv_device_bytes": cell.kv_device_bytes, "kv_dense_bytes": 0, "kv_host_bytes": cell.kv_host_bytes}
        nothing = dict.fromkeys(("held_budget", "attended_max", "prefill_s", "index_s", "ttft_s", "tt2t_s", "tpot_s"))
        measures: dict[str, Any] = {**nothing, **cell.means, **bytes_, "versions": {}}
        for (seed, depth), score in cell.scores.items():
            found.append(Record({**setting, "seed": seed, "depth": depth}, {**measures, "accuracy": score}))
    return found


def read_stretches(path: Path) -> list[Record]:
    """The records of perplexity in a folder of python -m lab compare, or in the file beside one that `write_cells` wrote."""
    if not path.is_file():
        return [record for record in ResultsFile(path / "results.jsonl") if "nll" in record.measures]
    beside = _beside(path)
    return [one for lines in _parsed(beside, _stretches) for one in lines] if beside.exists() else []


def write_stretches(records: Iterable[Record], path: Path) -> None:
    """All records of perplexity in one file, beside that of the cells: those of a variant after as many tokens in one line."""
    groups: dict[str, tuple[dict[str, Any], list[list[Any]]]] = {}
    for record in records:
        line = {"setting": dict(record.setting), **record.measures}
        own = [line["setting"].pop(name) for name in ("seed", "start")] + [line.pop(name) for name in _EACH]
        groups.setdefault(json.dumps(line), (line, []))[1].append(own)
    made = ({**line, "stretches": some} for line, some in groups.values())
    _beside(path).write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in made), encoding="utf-8")


def _stretches(text: str) -> list[Record]:
    line = json.loads(text)
    setting, some = line.pop("setting"), line.pop("stretches")
    return [
        Record({**setting, "seed": seed, "start": start}, {**line, **dict(zip(_EACH, own, strict=True))})
        for seed, start, *own in some
    ]


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.stem}-perplexity.jsonl")


def _parsed(path: Path, read: Callable[[str], T]) -> list[T]:
    """The lines of a file. Raises ConfigError that names the file and the line that cannot be read."""
    found = []
    for number, raw in enumerate(path.read_bytes().splitlines(), 1):
        try:
            found.append(read(raw.decode("utf-8")))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"line {number} of {str(path)!r} is not a cell of python -m lab compare: {error}") from error
    return found
