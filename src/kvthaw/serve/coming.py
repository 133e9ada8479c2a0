"""Documents that are prefilled while no client waits for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from kvthaw.cache.prefix_kept import Key
from kvthaw.serve.errors import ApiError, as_api_error
from kvthaw.serve.jobs import Job

_log = logging.getLogger(__name__)
_FAILURES = 256  # that are listed


class Coming:
    """Jobs that keep a prompt, by its key, with the error of failed ones. A job leaves once its key's prompt is kept or
    deleted."""

    def __init__(self) -> None:
        self.jobs: dict[Key, tuple[Job, ApiError | None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, key: Key, job: Job, kept: Coroutine[Any, Any, object]) -> None:
        """Add a job until its prompt is `kept`."""
        self.jobs.pop(key, None)
        self.jobs[key] = job, None
        task = asyncio.create_task(self._end(key, job, kept))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def take(self, key: Key) -> Job | None:
        """Remove and return a job, or None."""
        return self.jobs.pop(key, (None, None))[0]

    async def _end(self, key: Key, job: Job, kept: Coroutine[Any, Any, object]) -> None:
        failure = None
        try:
            await kept
        except Exception as error:
            failure = as_api_error(error)
            if failure.status >= 500:
                _log.error("the context %r was not kept", key[1], exc_info=error)
        if self.jobs.get(key, (None, None))[0] is not job:
            return  # another one has its name, or it was deleted
        if failure is None:
            del self.jobs[key]
            return
        self.jobs[key] = job, failure
        failed = [one for one, (_, error) in self.jobs.items() if error is not None]
        for one in failed[:-_FAILURES]:
            del self.jobs[one]
