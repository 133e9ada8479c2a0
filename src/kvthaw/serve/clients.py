"""What the routes know of a client: the service that it asks, and whether it still listens."""

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
    """Let the job go as soon as the client leaves, or the block ends."""

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
