"""Helpers of routes: the service and the client of a request, and cancellation when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import Request
from starlette.types import Receive

from kvthaw.serve.errors import client_left, shutting_down
from kvthaw.serve.jobs import Job
from kvthaw.serve.service import Service

Result = TypeVar("Result")
CLIENT = "kvthaw.client"
"""Name of a scope's entry for the request's API key, where the server has several."""


def service_of(http: Request) -> Service:
    """Return the service that a request is for."""
    service: Service = http.app.state.service
    return service


@asynccontextmanager
async def attended(http: Request, job: Job) -> AsyncIterator[None]:
    """Cancel the job as soon as the client disconnects or the block ends. Its named prompt is saved in any case."""
    service = service_of(http)

    async def watch() -> None:
        await _gone(http.receive)
        service.worker.cancel(job)

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        service.worker.cancel(job)
        service.documents.save(job)


def client_of(http: Request) -> str:
    """Return the identity by which clients take turns: the API key if the server has several, else the address."""
    key: str | None = http.scope.get(CLIENT)
    return key or ("" if http.client is None else http.client.host)


async def while_connected(http: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Return what work returns. Cancels it, and raises ApiError, as soon as the client disconnects or the server is to end."""
    worked = asyncio.create_task(work)
    others = asyncio.create_task(_gone(http.receive)), asyncio.create_task(service_of(http).ending.wait())
    try:
        await asyncio.wait({worked, *others}, return_when=asyncio.FIRST_COMPLETED)
        if worked.done():
            return worked.result()
        raise shutting_down() if others[1].done() else client_left()
    finally:
        for task in (worked, *others):
            task.cancel()


async def _gone(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
