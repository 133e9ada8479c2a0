"""Routes for documents that are prefilled once and kept under a name."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from kvthaw.errors import CacheError, ConfigError
from kvthaw.serve.answers import Json
from kvthaw.serve.clients import attended, service_of
from kvthaw.serve.errors import ApiError, as_api_error, too_long
from kvthaw.serve.schema import ContextRequest, Name
from kvthaw.serve.service import Service

router = APIRouter(prefix="/v1/contexts")


@router.post("")
async def create(body: ContextRequest, http: Request) -> Json:
    """Prefill a document, and keep it in the place of what has its name."""
    service = service_of(http)
    body.check()
    service.check(None, 1)
    service.kept()
    if body.messages is not None:
        ids = await service.encode_chat(body.messages, answer=False)
    else:
        ids = await service.encode(body.text or "")
    param = "text" if body.messages is None else "messages"
    if len(ids) + 1 > service.batch.capacity:
        raise too_long(len(ids), 1, service.batch.capacity, param)
    try:
        request = service.batch.request(ids, max_new_tokens=1, cache_salt=body.cache_salt, name=body.name)
    except ConfigError as error:
        raise ApiError(400, str(error), param=param) from None
    service.check(None, 1)
    job = service.worker.submit([request])
    async with attended(service, job, http.receive):
        outputs = await job.whole()
    for output in outputs:
        if isinstance(output.error, CacheError):
            raise ApiError(400, str(output.error), param="name", code="context_not_kept")
        if output.error is not None:
            raise as_api_error(output.error)
    await service.save(body.name, body.messages)
    return _card(service, body.name) | {"cached_tokens": sum(output.cached_tokens for output in outputs)}


@router.get("")
async def contexts(http: Request) -> Json:
    """List the documents that are kept."""
    service = service_of(http)
    return {"object": "list", "data": [_card(service, name) for name in sorted(service.kept())]}


@router.get("/{name}")
async def context(name: Name, http: Request) -> Json:
    """Describe a document that is kept."""
    await service_of(http).refresh(name)
    return _card(service_of(http), name)


@router.delete("/{name}", status_code=204)
async def delete(name: Name, http: Request) -> Response:
    """Let a document go."""
    service = service_of(http)
    await service.refresh(name)
    _card(service, name)
    await service.forget(name)
    return Response(status_code=204)


def _card(service: Service, name: str) -> Json:
    entry = service.kept().get(name)
    if entry is None:
        raise ApiError(404, f"no context is named {name!r}", param="name", code="context_not_found")
    return {"id": name, "object": "context", "tokens": len(entry.ids), "messages": name in service.messages}
