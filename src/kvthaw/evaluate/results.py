"""Results: one record a run, kept as lines of JSON in a file that a later run continues."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kvthaw.errors import ConfigError

Setting = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Record:
    """A result's setting and its measurements, as plain JSON values.

    The setting's "options", a digest of a method's options, is no part of the key: a record with other options is out of date.
    """

    setting: Setting
    measures: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.measures[name] if name in self.measures else self.setting[name]

    @property
    def key(self) -> str:
        """The setting as one string."""
        return key_of(self.setting)

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps({"setting": self.setting, **self.measures})

    @staticmethod
    def from_json(text: str) -> Record:
        """Read a line that to_json() wrote. Raises ValueError, KeyError or TypeError for anything else."""
        measures = json.loads(text)
        setting = measures.pop("setting")
        if not isinstance(setting, dict):
            raise TypeError(f"its setting is {setting!r}")
        return Record(setting, measures)


def key_of(setting: Mapping[str, Any]) -> str:
    """Return a setting as one string."""
    return json.dumps({name: value for name, value in setting.items() if name != "options"}, sort_keys=True)


class ResultsFile:
    """Records by setting, with an optional file: records in the file are known, and new ones are appended at once.

    The latest record of a setting counts; iteration is in the order of writing. Several processes may share a file: each
    record is written once. Raises FileNotFoundError if the folder does not exist, and ConfigError for a line that is not a
    record.
    """

    def __init__(self, path: Path | None = None) -> None:
        if path is not None and not path.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, "its folder does not exist", str(path))
        self.path = path
        self._records: dict[str, Record] = {}
        self._outdated: dict[str, str] = {}
        self._end = 0  # bytes of the file that have been read: whole lines
        if path is not None and path.exists():
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH)
                self._catch_up(file)

    def get(self, setting: Setting) -> Record | None:
        """Return the record of a setting, if it is known and not out of date."""
        key = key_of(setting)
        record = self._records.get(key)
        if record is None or _current(record, setting):
            return record
        self._outdated[key] = str(record.setting["method"])
        return None

    @property
    def outdated(self) -> Counter[str]:
        """The number of requested settings with an outdated record, by method."""
        return Counter(self._outdated.values())

    def add(self, *records: Record) -> None:
        """Keep records. The file is written and closed, so that a stop at any time loses nothing."""
        new = {record.key: record for record in records}
        if self.path is not None and new:
            with self.path.open("a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                self._catch_up(file)
                new = {key: one for key, one in new.items() if key not in self._records or not self._same(key, one)}
                file.truncate(self._end)  # a stop may have left an unfinished line
                self._end += file.write("".join(record.to_json() + "\n" for record in new.values()).encode())
        for record in new.values():
            self._put(record)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    def _same(self, key: str, record: Record) -> bool:
        return _current(self._records[key], record.setting)

    def _put(self, record: Record) -> None:
        self._records.pop(record.key, None)
        self._records[record.key] = record

    def _catch_up(self, file: IO[bytes]) -> None:
        """Read the lines that were written since the last time."""
        file.seek(self._end)
        for raw in file.read().splitlines(keepends=True):
            try:
                line = raw.decode("utf-8")
                record = Record.from_json(line) if line.strip() else None
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                if raw.startswith(b'{"setting"') and not raw.endswith(b"\n"):
                    return
                file.seek(0)
                number = file.read(self._end).count(b"\n") + 1
                problem = f"out is {str(self.path)!r}, whose line {number} is not a result of kvthaw; name another file"
                raise ConfigError(problem) from error
            self._end += len(raw)
            if record is not None:
                self._put(record)


def _current(record: Record, setting: Setting) -> bool:
    return record.setting.get("options", "") in ("", setting.get("options", ""))


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are numbers; None if no value is."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    return sum(known) / len(known) if known else None


def shared(records: Sequence[Record], *names: str) -> dict[str, Any]:
    """Return fields that are the same in all records, as the first has them."""
    return {name: records[0][name] for name in names}


def means(records: Sequence[Record], *names: str) -> dict[str, float | None]:
    """Return the mean of each measure over the records that have it."""
    return {name: mean(record[name] for record in records) for name in names}


def largest(records: Sequence[Record], *names: str) -> dict[str, Any]:
    """Return the largest of each measure over the records that have it."""
    return {name: max((record[name] for record in records if record[name] is not None), default=None) for name in names}


def noted(text: str) -> None:
    """Print a remark between results."""
    print(text, file=sys.stderr, flush=True)


BYTES = ("kv_device_bytes", "kv_dense_bytes", "kv_host_bytes")


def asked_budget(record: Record) -> int | float | None:
    """Return the requested budget, or the one that the cache used."""
    budget: int | float | None = record.setting["budget"]
    return budget if budget is not None else record["held_budget"]
