"""Helpers of routes: the service of a request, and cancellation when its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Request
from starlette.types import Receive

from kvthaw.serve.jobs import Job
from kvthaw.serve.service import Service


def service_of(http: Request) -> Service:
    """Return the service that a request is for."""
    service: Service = http.app.state.service
    return service


@asynccontextmanager
async def attended(service: Service, job: Job, receive: Receive) -> AsyncIterator[None]:
    """Cancel the job as soon as the client disconnects or the block ends."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        service.worker.cancel(job)

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        service.worker.cancel(job)
