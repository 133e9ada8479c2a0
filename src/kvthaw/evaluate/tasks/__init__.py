"""Long-context tasks: generators for training and for `kvthaw eval`, loaders for the published files."""

from __future__ import annotations

from pathlib import Path

from kvthaw.errors import ConfigError

from . import kv_retrieval, longeval, niah, passkey, variable_tracking
from .base import Reads, Sample, Task

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        *passkey.GENERATORS,
        *niah.GENERATORS,
        *longeval.GENERATORS,
        *kv_retrieval.GENERATORS,
        *variable_tracking.GENERATORS,
    )
}


def find(name: str, data: Path | None = None) -> Task:
    """The task of that name, over the files at `data` if given. Raises ConfigError for a name that is not in TASKS, for files that
    do not fit the task, and for files where it takes none."""
    if name not in TASKS:
        raise ConfigError(f"task is {name!r}; there are: {', '.join(TASKS)}")
    task = TASKS[name]
    if data is None:
        return task
    if not isinstance(task, Reads):
        raise ConfigError(f"data is {str(data)!r}; {name} is generated and reads no files")
    if not data.exists():
        raise ConfigError(f"data is {str(data)!r}; there is no such file or folder")
    return task.reading(data)


__all__ = ["TASKS", "Reads", "Sample", "Task", "find"]
