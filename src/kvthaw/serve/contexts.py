"""Routes for documents that are prefilled once and kept under a name."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from fastapi.responses import JSONResponse, Response

from kvthaw.cache.prefix_kept import Key
from kvthaw.engine.request import Request as Prompt
from kvthaw.engine.request import hidden_salt
from kvthaw.errors import ConfigError
from kvthaw.serve.answers import Json
from kvthaw.serve.bodies import BodyRoute
from kvthaw.serve.errors import ApiError, as_api_error, shutting_down
from kvthaw.serve.fields import Name
from kvthaw.serve.jobs import Job
from kvthaw.serve.schema import ContextRequest
from kvthaw.serve.service import Service, attended, client_of, refused, service_of
from kvthaw.serve.turns import about_document

router = APIRouter(prefix="/v1/contexts", route_class=BodyRoute)
Salt = Annotated[str, Header(alias="Cache-Salt", max_length=256)]
"""Names of other salts are none to a request."""


@router.post("", responses={202: {"description": "it is being prefilled"}})
async def create(body: ContextRequest, http: Request) -> Response:
    """Prefill a document and keep it. It replaces a document of the same name."""
    service = service_of(http)
    body.check()
    service.check(None, 1)
    service.documents.kept()
    about: Any = None
    if body.document is not None:
        param, ids = "document", await service.encode_document(body.document, client_of(http))
        about = about_document(body.document) if service.chats else None
    elif body.messages is not None:
        param = "messages"
        about = [message.model_dump(exclude_none=True) for message in body.messages]
        ids = await service.encode_chat(body.messages, answer=False, client=client_of(http))
    else:
        param = "text"
        ids = await service.encode(body.text or "", param="text", client=client_of(http))
    try:
        request = service.batch.request(
            ids, max_new_tokens=1, cache_salt=body.cache_salt, client=client_of(http), name=body.name, about=about
        )
    except ConfigError as error:
        raise refused(body, error, param) from None
    service.admit(1)
    job, key = service.worker.submit([request]), (request.spec.salt, body.name)
    service.documents.cancel(key)  # no client waits for an earlier one, and it may end later
    if not body.wait:
        service.documents.expect(key, job, _kept(service, job))
        return JSONResponse(_coming(job, None), 202)
    http.state.job, http.state.outputs = job, 1
    async with attended(http, job):
        await job.whole()
    return JSONResponse(await _kept(service, job))


@router.get("")
async def contexts(http: Request, cache_salt: Salt = "") -> Json:
    """List kept documents, and documents that are prefilled without a waiting client."""
    service, salt = service_of(http), _salt(cache_salt)
    names = {*service.documents.kept(salt), *(name for own, name in service.documents.coming if own == salt)}
    return {"object": "list", "data": [_card(service, (salt, name)) for name in sorted(names)]}


@router.get("/{name}")
async def context(name: Name, http: Request, cache_salt: Salt = "") -> Json:
    """Describe a document."""
    key = _salt(cache_salt), name
    await service_of(http).documents.refresh(key)
    return _card(service_of(http), key)


@router.delete("/{name}", status_code=204)
async def delete(name: Name, http: Request, cache_salt: Salt = "") -> Response:
    """Delete a document and its files."""
    service, key = service_of(http), (_salt(cache_salt), name)
    await service.documents.refresh(key)
    if not service.documents.has_files(key):
        _card(service, key)
    service.documents.cancel(key)
    await service.documents.forget(key)
    return Response(status_code=204)


async def _kept(service: Service, job: Job) -> Json:
    """Wait until a job's document is kept and saved, and return its description; raises ApiError."""
    outputs, request = await job.whole(), job.requests[0]
    if job.cut_short:
        raise shutting_down()
    unsaved = await service.documents.save(job)
    for output in outputs:
        if output.error is not None:
            raise as_api_error(output.error, "name")
    if unsaved is not None:
        raise ApiError(500, unsaved, param="name", code="context_not_saved")
    return _told(request, "completed", cached_tokens=sum(output.cached_tokens for output in outputs))


def _card(service: Service, key: Key) -> Json:
    if key in service.documents.coming:
        return _coming(*service.documents.coming[key])
    entry = service.documents.entry(key, "name")
    return _made(key[1], "completed", len(entry.ids), entry.about)


def _coming(job: Job, error: ApiError | None) -> Json:
    request, failed = job.requests[0], {} if error is None else error.body()
    return _told(request, "failed" if failed else "in_progress", prefilled_tokens=request.prefilled, **failed)


def _told(request: Prompt, status: str, **more: Any) -> Json:
    return _made(request.spec.name, status, request.prompt, request.spec.about) | more


def _made(name: str | None, status: str, tokens: int, about: Any) -> Json:
    return {"id": name, "object": "context", "status": status, "tokens": tokens, "messages": isinstance(about, list)}


def _salt(header: str) -> str:
    """Return the hash of a header's salt, which arrives as Latin-1 and may be UTF-8."""
    try:
        return hidden_salt(header.encode("latin-1").decode())
    except ValueError:
        return hidden_salt(header)
