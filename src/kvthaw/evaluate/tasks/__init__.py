"""Long-context tasks: generators for training and for `kvthaw eval`, loaders for the published files."""

from __future__ import annotations

from . import kv_retrieval, longeval, niah, passkey, variable_tracking
from .base import Sample, Task

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

__all__ = ["TASKS", "Sample", "Task"]
