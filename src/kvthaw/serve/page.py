"""Routes of the page, and of what its answers recalled."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import Response

from kvthaw.inspect.page import asset, label, run_data, served, text_data
from kvthaw.serve.answers import Json
from kvthaw.serve.clients import service_of
from kvthaw.serve.errors import ApiError
from kvthaw.serve.service import Service
from kvthaw.serve.watcher import Recall

FILES = {"/": "text/html", "/page.css": "text/css", "/page.js": "text/javascript", "/chat.js": "text/javascript"}
"""Paths of the page's files, which need no key, and their types."""
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
router = APIRouter()


@router.get("/", include_in_schema=False)
@router.get("/page.css", include_in_schema=False)
@router.get("/page.js", include_in_schema=False)
@router.get("/chat.js", include_in_schema=False)
async def page(http: Request) -> Response:
    """Return a file of the page."""
    path = http.url.path
    return Response(served() if path == "/" else asset(path[1:]), media_type=FILES[path], headers=_HEADERS)


@router.get("/v1/recalls/{name}")
async def recall(name: str, http: Request) -> Json:
    """Return what the tokens of an answer recalled, for the page."""
    service = service_of(http)
    found = service.worker.watcher.recalls.get(name)
    if found is None:
        raise ApiError(404, f"nothing is recorded of {name!r}", param="name", code="recall_not_found")
    if found.open:
        raise ApiError(409, f"{name!r} has not ended", param="name", code="recall_open")
    return await asyncio.to_thread(_data, service, found)


def _data(service: Service, recall: Recall) -> Json:
    request, settings = recall.request, service.batch.cache.settings
    answer = request.tokens[: len(recall.recording.selected)]
    head = text_data(service.tokenizer, request.ids.tolist(), (), answer)
    name = label(settings.method.name, settings.budget, settings.retrieved)
    run = run_data(name, recall.recording, request.prompt + len(answer))
    return {"id": service.name, "title": service.name, **head, "runs": [run]}
