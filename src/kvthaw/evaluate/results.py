"""What a run writes: one line a sample and variant, kept in a file that a later run continues, and their summary."""

from __future__ import annotations

import errno
import fcntl
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any, Generic, Protocol, TypeVar

from kvthaw.errors import ConfigError
from kvthaw.evaluate.metrics import mean, wilson


class AsKey:
    """A dataclass that all of a line depends on. Its fields hold plain values."""

    __slots__ = ()

    def key(self) -> str:
        """The setting as one string, of all fields that it is compared by."""
        compared = (one.name for one in fields(self) if one.compare)  # type: ignore[arg-type]
        return json.dumps({name: getattr(self, name) for name in compared}, sort_keys=True)


@dataclass(frozen=True, slots=True)
class OfModel(AsKey):
    """What every line depends on. model, weights: its name and the fingerprint of its weights. kvthaw: its version."""

    model: str
    weights: str
    dtype: str
    device: str
    kvthaw: str


class AsLine:
    """A dataclass that is written as a line."""

    __slots__ = ()

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))  # type: ignore[call-overload]


@dataclass(frozen=True, slots=True)
class OfVariant(OfModel):
    """What every line of a method depends on. budget, retrieved: as asked for. options: a digest of all options that the method
    had, those that were not given as well; "" in lines from before it was kept. It is no part of the key: a line whose options are
    not those of today is out of date."""

    method: str
    budget: int | float | None
    retrieved: int | None
    dense_layers: int
    options: str = field(default="", kw_only=True, compare=False)


@dataclass(frozen=True, slots=True)
class Setting(OfVariant):
    """All that a line depends on; two lines of one setting are the same line.

    depth: where the fact was asked to stand, 0..1, None if left to the task. question: "dense" or "sparse". probe: observed every
    n-th step, 0 for none. source: a hash of the haystack and files that were given, "" for what ships.
    """

    task: str
    length: int
    seed: int
    depth: float | None
    question: str
    probe: int
    source: str = ""


@dataclass(frozen=True, slots=True)
class Line(AsLine):
    """One sample under one variant. Bytes are of K and V; seconds are wall time without the probe's.

    accuracy: the share of the answers that the output holds. prompt: tokens. held_budget: the promise that the cache kept.
    attended: tokens read per KV head and step. kv_device_bytes: of the layers under the method; kv_dense_bytes: of the first
    layers kept dense beside it. prefill_s: shared by all variants; index_s: offloading and indexing after it; ttft_s, tt2t_s:
    from the start of the prefill, with index_s where the cache was needed by then; tpot_s: (end - first) / (tokens - 1). None where
    samples shared their steps.
    """

    setting: Setting
    prompt: int
    output: str
    answers: tuple[str, ...]
    at: float | None
    accuracy: float
    held_budget: int | None
    retrieved: float | None
    attended_mean: float | None
    attended_max: int | None
    attention_mass: float | None
    recall_at_k: float | None
    output_error: float | None
    hit_rate: float | None
    sparse_steps: int
    kv_device_bytes: int
    kv_dense_bytes: int
    kv_host_bytes: int
    new_tokens: int
    prefill_s: float | None
    index_s: float | None
    ttft_s: float | None
    tt2t_s: float | None
    tpot_s: float | None
    versions: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def from_json(text: str) -> Line:
        """The reverse. Raises ValueError, KeyError or TypeError for anything else."""
        data = json.loads(text)
        data["setting"] = Setting(**data["setting"])
        data["answers"] = tuple(data["answers"])
        return Line(**data)


class Keyed(Protocol):
    """What a line depends on."""

    def key(self) -> str:
        """All of it as one string."""


class Written(Protocol):
    """A line of a results file."""

    @property
    def setting(self) -> Keyed:
        """What the line depends on, written first."""

    def to_json(self) -> str:
        """One line of JSON."""


L = TypeVar("L", bound=Written)


class Kept(Generic[L]):
    """Lines by setting, in a file if a path is given: what stands there is known, what is added is appended at once. Of two lines
    of a setting the later one counts, and lines are iterated over in the order in which they were written.

    read: makes a line of its JSON; raises ValueError, KeyError or TypeError for anything else. Raises FileNotFoundError for a path
    in no folder.
    """

    def __init__(self, path: Path | None, read: Callable[[str], L]) -> None:
        if path is not None and not path.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, "its folder does not exist", str(path))
        self.path = path
        self._lines: dict[str, L] = {}
        self._outdated: dict[str, str] = {}  # the methods of lines that were asked for and are out of date
        self._read, self._end = read, 0  # bytes of the file that have been read: whole lines
        if path is not None and path.exists():
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH)
                self._take(file)

    def get(self, setting: Keyed) -> L | None:
        """The line of a setting, if known and not out of date."""
        key = setting.key()
        line = self._lines.get(key)
        if line is None or self._current(key, setting):
            return line
        self._outdated[key] = line.setting.method  # type: ignore[attr-defined]
        return None

    @property
    def outdated(self) -> Counter[str]:
        """Of how many settings the line was asked for and found out of date, by method."""
        return Counter(self._outdated.values())

    def add(self, line: L) -> None:
        """Keep a line. A file is written and closed, so that a stop at any time loses nothing."""
        self.extend([line])

    def extend(self, lines: Iterable[L]) -> None:
        """Keep lines. Those that another process has written to the file meanwhile are not written again."""
        new = {line.setting.key(): line for line in lines}
        if self.path is not None and new:
            with self.path.open("a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                self._take(file)
                new = {key: line for key, line in new.items() if not self._current(key, line.setting)}
                file.truncate(self._end)  # a stop may have left an unfinished line
                self._end += file.write("".join(line.to_json() + "\n" for line in new.values()).encode())
        for key, line in new.items():
            self._put(key, line)

    def __iter__(self) -> Iterator[L]:
        return iter(self._lines.values())

    def _current(self, key: str, setting: Keyed) -> bool:
        """Whether a setting's line is known and not out of date."""
        line = self._lines.get(key)
        if line is None:
            return False
        was = line.setting
        both = isinstance(was, OfVariant) and isinstance(setting, OfVariant)
        return not both or was.options in ("", setting.options)  # type: ignore[attr-defined]

    def _take(self, file: IO[bytes]) -> None:
        """Read the lines that have come since the last time."""
        file.seek(self._end)
        for raw in file.read().splitlines(keepends=True):
            try:
                line = raw.decode("utf-8")
                found = self._read(line) if line.strip() else None
            except (ValueError, KeyError, TypeError) as error:
                if raw.startswith(b'{"setting"') and not raw.endswith(b"\n"):
                    break
                file.seek(0)
                number = file.read(self._end).count(b"\n") + 1
                problem = f"out is {str(self.path)!r}, whose line {number} is not a result of kvthaw eval; name another file"
                raise ConfigError(problem) from error
            self._end += len(raw)
            if found is not None:
                self._put(found.setting.key(), found)

    def _put(self, key: str, line: L) -> None:
        self._lines.pop(key, None)
        self._lines[key] = line


class Lines(Protocol):
    """Where lines of tasks are kept."""

    def get(self, setting: Setting) -> Line | None:
        """The line of a setting, if known."""

    def extend(self, lines: Iterable[Line]) -> None:
        """Keep lines."""


class Results(Kept[Line]):
    """The lines of tasks."""

    def __init__(self, path: Path | None = None) -> None:
        super().__init__(path, Line.from_json)


@dataclass(frozen=True, slots=True)
class Summary:
    """Means over the samples of one variant. accuracy_95: Wilson's interval. full_accuracy: full attention's on them."""

    task: str
    method: str
    budget: int | float | None
    retrieved: float | None
    dense_layers: int
    length: int
    n: int
    accuracy: float
    accuracy_95: tuple[float, float]
    full_accuracy: float | None
    attention_mass: float | None
    recall_at_k: float | None
    output_error: float | None
    hit_rate: float | None
    attended_mean: float | None
    attended_max: int | None
    kv_device_bytes: int
    kv_dense_bytes: int
    kv_host_bytes: int
    prefill_s: float | None
    index_s: float | None
    ttft_s: float | None
    tt2t_s: float | None
    tpot_s: float | None
    question: str
    seed: int
    model: str
    weights: str
    dtype: str
    device: str
    versions: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """A plain dict, for JSON."""
        return asdict(self)


_MEANS = ("retrieved", "attention_mass", "recall_at_k", "output_error", "hit_rate", "attended_mean")
_SECONDS = ("prefill_s", "index_s", "ttft_s", "tt2t_s", "tpot_s")


def summarize(lines: Iterable[Line], full: Iterable[Line]) -> Summary:
    """One variant's lines, all of one task and length, and full attention's on the same samples."""
    mine, theirs = list(lines), list(full)
    first = mine[0]
    accuracy = sum(line.accuracy for line in mine) / len(mine)
    means: dict[str, Any] = {name: mean(getattr(line, name) for line in mine) for name in (*_MEANS, *_SECONDS)}
    most = [line.attended_max for line in mine if line.attended_max is not None]
    same: dict[str, Any] = {
        name: getattr(first.setting, name) for name in ("task", "method", "dense_layers", "length", "question")
    }
    of_model: dict[str, Any] = {name: getattr(first.setting, name) for name in ("model", "weights", "dtype", "device")}
    asked = first.setting.budget
    return Summary(
        **same,
        **of_model,
        **means,
        budget=asked if asked is not None else first.held_budget,
        n=len(mine),
        accuracy=accuracy,
        accuracy_95=wilson(accuracy, len(mine)),
        full_accuracy=mean(line.accuracy for line in theirs),
        attended_max=max(most) if most else None,
        kv_device_bytes=max(line.kv_device_bytes for line in mine),
        kv_dense_bytes=max(line.kv_dense_bytes for line in mine),
        kv_host_bytes=max(line.kv_host_bytes for line in mine),
        seed=min(line.setting.seed for line in mine),
        versions=first.versions,
    )
