"""Long-context tasks: generators for training and for `python -m lab eval`, loaders for the published files."""

from __future__ import annotations

from pathlib import Path

from kvthaw.errors import ConfigError, unknown

from . import babilong, keyed, niah, passkey, ruler, variable_tracking
from .base import Reads, Sample, Task

_EVERY: tuple[Task, ...] = (
    *passkey.GENERATORS,
    *niah.GENERATORS,
    *keyed.GENERATORS,
    *variable_tracking.GENERATORS,
    *ruler.GENERATORS,
    *babilong.GENERATORS,
)
TASKS: dict[str, Task] = {task.name: task for task in _EVERY}
"""The only list of tasks, by name; published benchmarks, which are read, are in lab.evaluate.published."""
SUITES: dict[str, tuple[str, ...]] = {
    "niah": ("niah_single",),
    "ruler": tuple(task.name for task in ruler.GENERATORS),
    "babilong": tuple(task.name for task in babilong.GENERATORS),
}
"""The suites: names of several tasks."""


def named(names: str) -> list[str]:
    """Return the tasks of names and suites separated by commas, without repeats; "-" equals "_". Raises ConfigError for an
    unknown name."""
    found: dict[str, None] = {}
    for name in (part.strip().replace("-", "_") for part in names.split(",")):
        if name not in SUITES and name not in TASKS:
            raise unknown("task", name, (*SUITES, *TASKS))
        found.update(dict.fromkeys(SUITES.get(name, (name,))))
    return list(found)


def find(name: str, data: Path | None = None) -> Task:
    """Return the task of that name, over the files at `data` if given. Raises ConfigError for an unknown name, for files that
    do not fit the task, and for files given to a task without files."""
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    task = TASKS[name]
    if data is None:
        return task
    if not isinstance(task, Reads):
        raise ConfigError(f"data is {str(data)!r}; {name} is generated and reads no files")
    if not data.exists():
        raise ConfigError(f"data is {str(data)!r}; there is no such file or folder")
    return task.reading(data)


__all__ = ["SUITES", "TASKS", "Reads", "Sample", "Task", "find", "named"]
