"""Results by cell: all samples of a task at one length under one variant and protocol. A folder holds a file a cell."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast
from urllib.parse import quote

from kvthaw.errors import ConfigError
from kvthaw.evaluate import perplexity
from kvthaw.evaluate.metrics import mean, wilson
from kvthaw.evaluate.results import Kept, Keyed, Line, Setting, Written

_MEANS = ("attended_mean", "retrieved", "hit_rate", "attention_mass", "recall_at_k", "output_error")
_KEY = ("about", "task", "length", "question", "method", "budget", "retrieved", "dense_layers")
_ABOUT = ("model", "weights", "dtype", "device", "kvthaw", "source")


class Kind(Keyed, Protocol):
    """What the lines of a cell have in common, beside the sample."""

    @property
    def method(self) -> str: ...
    @property
    def budget(self) -> int | float | None: ...
    @property
    def retrieved(self) -> int | None: ...
    @property
    def dense_layers(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def options(self) -> str: ...


K = TypeVar("K", bound=Kind)
M = TypeVar("M", bound=Written)
T = TypeVar("T")


class Cells(Generic[K, M]):
    """Lines in a folder, a file a cell; what stands there is known. read: as for Kept.

    Raises FileNotFoundError where the folder that it would be made in does not exist.
    """

    def __init__(self, path: Path, part: str, read: Callable[[str], M]) -> None:
        if not path.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, "its folder does not exist", str(path))
        self.path, self._part, self._read = path, part, read
        self._files: dict[Path, Kept[M]] = {}
        self._absent: set[Path] = set()  # none of these was there; only `extend` makes them
        self._paths: dict[tuple[object, ...], Path] = {}

    def get(self, setting: K) -> M | None:
        """The line of a setting, if known."""
        path = self._path(setting)
        if path not in self._files and (path in self._absent or not path.exists()):
            self._absent.add(path)
            return None
        return self._file(path).get(setting)

    def extend(self, lines: Iterable[M]) -> None:
        """Keep lines."""
        by_file: dict[Path, list[M]] = {}
        for line in lines:
            by_file.setdefault(self._path(cast(K, line.setting)), []).append(line)
        for path, some in by_file.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file(path).extend(some)

    def __iter__(self) -> Iterator[M]:
        """All lines, but of a cell that was begun anew with other options those from before."""
        for path in sorted((self.path / self._part).rglob("*.jsonl")):
            options = [cast(K, line.setting).options for line in self._file(path)]
            yield from (line for line, of in zip(self._file(path), options, strict=True) if of in ("", options[-1]))

    @property
    def outdated(self) -> Counter[str]:
        """As of Kept, in all files."""
        return sum((file.outdated for file in self._files.values()), Counter())

    def _file(self, path: Path) -> Kept[M]:
        if path not in self._files:
            self._files[path] = Kept(path, self._read)
        return self._files[path]

    def _path(self, of: K) -> Path:
        cell = (of.method, repr(of.budget), of.retrieved, of.dense_layers, of.length, self._own(of))
        if cell not in self._paths:  # a large table asks for each some fifty times; 1.0 is not 1
            self._paths[cell] = self._name(of)
        return self._paths[cell]

    def _name(self, of: K) -> Path:
        asked = f"-{of.budget}" * (of.budget is not None) + f"-retrieved{of.retrieved}" * (of.retrieved is not None)
        folders, end = self._own(of)
        name = f"{quote(of.method, safe=':=,')}{asked}-dense{of.dense_layers}{end}.jsonl"
        return self.path.joinpath(self._part, *folders, str(of.length), name)

    def _own(self, of: K) -> tuple[tuple[str, ...], str]:
        """The folders above that of a cell's length, and the end of its file's name: what not all kinds have."""
        return (), ""


class Folder(Cells[Setting, Line]):
    """The lines of tasks."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "lines", Line.from_json)

    def _own(self, of: Setting) -> tuple[tuple[str, ...], str]:
        return (of.task,), f"-{of.question}"


class Stretches(Cells[perplexity.Setting, perplexity.Line]):
    """The lines of perplexity."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "stretches", perplexity.Line.from_json)


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

    def at_depths(self) -> dict[float, float]:
        """The mean score of the samples asked for at each depth."""
        found: dict[float, list[float]] = {}
        for (_, depth), score in self.scores.items():
            if depth is not None:
                found.setdefault(depth, []).append(score)
        return {depth: sum(found[depth]) / len(found[depth]) for depth in sorted(found)}

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


def cells_of(lines: Iterable[Line]) -> list[Cell]:
    """Lines by cell. A sample that was run twice, with selections observed and without, counts once."""
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        of = line.setting
        about = tuple(getattr(of, name) for name in _ABOUT)
        key = (about, *(getattr(of, name) for name in _KEY[1:]))
        groups.setdefault(key, []).append(line)
    return [
        Cell(
            **dict(zip(_KEY, key, strict=True)),
            scores={(line.setting.seed, line.setting.depth): line.accuracy for line in some},
            kv_device_bytes=max(line.kv_device_bytes + line.kv_dense_bytes for line in some),
            kv_host_bytes=max(line.kv_host_bytes for line in some),
            means={name: mean(getattr(line, name) for line in some) for name in _MEANS},
        )
        for key, some in groups.items()
    ]


def read_cells(path: Path) -> list[Cell]:
    """The cells of a folder of results, or of a file that `write_cells` wrote. Raises ConfigError where there are none."""
    cells = _parsed(path, Cell.from_json) if path.is_file() else cells_of(Folder(path))
    if not cells and not (path.is_dir() and read_stretches(path)):
        raise ConfigError(f"{str(path)!r} holds no results of kvthaw compare")
    return cells


_EACH = ("nll", "attended_mean", "attended_max", "seconds")
"""What each line of perplexity has of its own, beside where it begins."""


def read_stretches(path: Path) -> list[perplexity.Line]:
    """The lines of perplexity in a folder of results, or in the file beside one that `write_cells` wrote. Raises ConfigError where
    that is something else."""
    if not path.is_file():
        return list(Stretches(path))
    beside = _beside(path)
    if not beside.exists():
        return []

    def stretches(text: str) -> list[perplexity.Line]:
        record = json.loads(text)
        return [_stretch(record, *own) for own in record["stretches"]]

    return [line for lines in _parsed(beside, stretches) for line in lines]


def write_stretches(lines: Iterable[perplexity.Line], path: Path) -> None:
    """All lines of perplexity in one file, beside that of the cells: those of a variant after as many tokens in one line."""
    groups: dict[str, tuple[dict[str, Any], list[list[Any]]]] = {}
    for line in lines:
        record = asdict(line)
        own = [record["setting"].pop(name) for name in ("seed", "start")] + [record.pop(name) for name in _EACH]
        groups.setdefault(json.dumps(record), (record, []))[1].append(own)
    made = ({**record, "stretches": some} for record, some in groups.values())
    _replace(_beside(path), (json.dumps(record, separators=(",", ":")) for record in made))


def _stretch(record: dict[str, Any], seed: int, start: int, nll: list[float], *rest: Any) -> perplexity.Line:
    setting = perplexity.Setting(**record["setting"], seed=seed, start=start)
    shared = {name: value for name, value in record.items() if name not in ("setting", "stretches")}
    return perplexity.Line(setting=setting, nll=tuple(nll), **shared, **dict(zip(_EACH[1:], rest, strict=True)))


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.stem}-perplexity.jsonl")


def write_cells(cells: Iterable[Cell], path: Path) -> None:
    """One line a cell."""
    _replace(path, (cell.to_json() for cell in cells))


def _parsed(path: Path, read: Callable[[str], T]) -> list[T]:
    """The lines of a file. Raises ConfigError that names the file and the line that cannot be read."""
    found = []
    for number, raw in enumerate(path.read_bytes().splitlines(), 1):
        try:
            found.append(read(raw.decode("utf-8")))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"line {number} of {str(path)!r} is not a result of kvthaw compare: {error}") from error
    return found


def _replace(path: Path, lines: Iterable[str]) -> None:
    """Write a file whole: who reads meanwhile finds the one before."""
    made = path.with_name(f".{path.name}.{os.getpid()}")
    made.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    made.replace(path)
