"""The routes, and what applies to all of them: API keys, body size, error format, client disconnects."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvthaw.errors import ConfigError, hint
from kvthaw.serve import contexts, page
from kvthaw.serve.answers import Answer, ChatAnswer, CompletionAnswer, Json
from kvthaw.serve.clients import attended, service_of
from kvthaw.serve.errors import ERRORS, ApiError, as_api_error
from kvthaw.serve.jobs import Job
from kvthaw.serve.responses import ResponseAnswer
from kvthaw.serve.schema import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    Sampled,
    TokenizeRequest,
    names_within,
)
from kvthaw.serve.service import Service, refused
from kvthaw.version import __version__

MOST_BYTES = 16 << 20
"""Bytes of a body."""
KEEP_ALIVE = 10.0
"""Seconds of silence after which a stream gets a comment."""
OPEN_PATHS = ("/health", "/ready", *page.FILES)
"""Those that need no key."""

_STREAMS: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}
router = APIRouter()


def create_app(service: Service, *, api_keys: Sequence[str] = ()) -> FastAPI:
    """Return the ASGI application, whose lifespan is that of the service's worker. api_keys: one of them must come with every
    request, where there are any."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        yield
        await service.worker.stop()

    app = FastAPI(title="kvthaw", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.service = service
    for each in (router, contexts.router, page.router):
        app.include_router(each, responses=ERRORS)
    app.add_middleware(Guard, api_keys=api_keys)
    app.add_exception_handler(ApiError, _raised)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _failed)
    return app


class Guard:
    """Refuses requests without a key and bodies that are too large."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app, self._keys = app, [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if not self._allowed(scope):
            error = ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
            return await error.response()(scope, receive, send)
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MOST_BYTES:
                raise HTTPException(413, f"the body has more than {MOST_BYTES} bytes")
            return message

        return await self._app(scope, counted, send)

    def _allowed(self, scope: Scope) -> bool:
        if not self._keys or scope["path"] in OPEN_PATHS:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"").removeprefix(b"Bearer ")
        return sum(hmac.compare_digest(given, key) for key in self._keys) > 0  # compares all of them, whichever is right


@router.post("/v1/chat/completions", responses=_STREAMS)
async def chat(body: ChatRequest, http: Request) -> Response:
    """Answer a conversation."""
    service = service_of(http)
    body.check()
    service.check(body.model, body.n)
    prompts = [await service.encode_chat([*(await service.context_messages(body)), *body.messages])]
    return await _generate(http, body, prompts, ChatAnswer(body, prompts, service.tokenizer, service.name), "messages")


@router.post("/v1/completions", responses=_STREAMS)
async def completions(body: CompletionRequest, http: Request) -> Response:
    """Continue texts or tokens."""
    service = service_of(http)
    body.check()
    service.check(body.model, len(body.prompts) * body.n)
    before = await service.context_tokens(body)
    prompts = [
        before + (await service.encode(one, special=not before) if isinstance(one, str) else one) for one in body.prompts
    ]
    return await _generate(http, body, prompts, CompletionAnswer(body, prompts, service.tokenizer, service.name), "prompt")


@router.post("/v1/responses", responses=_STREAMS)
async def responses(body: ResponsesRequest, http: Request) -> Response:
    """Answer a conversation with a response, of which nothing is kept."""
    service = service_of(http)
    body.check()
    service.check(body.model, 1)
    prompts = [await service.encode_chat([*await service.context_messages(body), *body.messages], param="input")]
    return await _generate(http, body, prompts, ResponseAnswer(body, prompts, service.tokenizer, service.name), "input")


@router.get("/v1/models")
async def models(http: Request) -> Json:
    """List the model that is served."""
    return {"object": "list", "data": [_card(service_of(http))]}


@router.get("/v1/models/{name:path}")
async def model(name: str, http: Request) -> Json:
    """Describe the model that is served."""
    service = service_of(http)
    if name != service.name:
        raise ApiError(404, f"the model {name!r} is not served; {service.name!r} is", param="model", code="model_not_found")
    return _card(service)


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, http: Request) -> Json:
    """Return the tokens of a text or a conversation."""
    service = service_of(http)
    body.check()
    if body.messages is not None:
        tokens = await service.encode_chat(body.messages)
    else:
        tokens = await service.encode(body.prompt or "", special=body.add_special_tokens)
    return {"tokens": tokens, "count": len(tokens), "max_model_len": service.batch.capacity}


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, http: Request) -> Json:
    """Return the text of tokens."""
    return {"prompt": await asyncio.to_thread(service_of(http).tokenizer.decode, body.tokens)}


@router.get("/health", response_class=Response)
async def health(http: Request) -> Response:
    """Say that the process lives and can compute."""
    return Response(status_code=200 if service_of(http).worker.failure is None else 503)


@router.get("/ready")
async def ready(http: Request) -> JSONResponse:
    """Say whether requests are taken."""
    is_ready = service_of(http).ready
    return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)


@router.get("/version")
async def version() -> Json:
    """Return kvthaw's version."""
    return {"version": __version__}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(http: Request) -> Response:
    """Return metrics in Prometheus' text format."""
    return Response(service_of(http).worker.metrics.text(), media_type="text/plain; version=0.0.4")


async def _generate(
    http: Request,
    body: ChatRequest | CompletionRequest | ResponsesRequest,
    prompts: Sequence[Sequence[int]],
    answer: Answer,
    param: str,
) -> Response:
    service = service_of(http)
    try:
        sampling = body.sampling(await service.grammar(body))
    except ConfigError as error:
        raise refused(body, error, param) from None
    job = service.submit(body, prompts, sampling, param, answer.id)
    if body.stream:
        return EventStream(service, job, _events(service, job, answer, body))
    async with attended(service, job, http.receive):
        outputs = await job.whole()
    if outputs and outputs[-1].error is not None:
        raise as_api_error(outputs[-1].error)
    if body.kv_name is not None:
        await service.save(body.kv_name)
    if len(outputs) < len(job.requests) or any(output.finished is None for output in outputs):
        return Response(status_code=499)  # nobody reads it
    return JSONResponse(answer.whole(outputs))


async def _events(service: Service, job: Job, answer: Answer, body: Sampled) -> AsyncIterator[bytes]:
    """Yield server-sent events."""
    yield answer.encode(answer.opening())
    async for deltas in job.stream(KEEP_ALIVE):
        error = deltas[-1].error if deltas else None
        added = b"".join(answer.added(delta) for delta in deltas if delta.error is None)
        if error is not None:
            yield added + answer.encode([answer.failed(as_api_error(error))])
            return
        if added or not deltas:
            yield added or b": keep-alive\n\n"
    if body.kv_name is not None:
        await service.save(body.kv_name)
    yield answer.encode(answer.closing()) + answer.ending


class EventStream(StreamingResponse):
    """A stream of events whose job is cancelled when it ends for any reason."""

    def __init__(self, service: Service, job: Job, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._service, self._job = service, job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with attended(self._service, self._job, receive):
            await self.stream_response(send)


def _card(service: Service) -> Json:
    card = {"id": service.name, "object": "model", "created": service.created, "owned_by": "kvthaw"}
    return card | {"max_model_len": service.batch.capacity, "chat_template": service.chats}


async def _raised(_: Request, error: Exception) -> Response:
    return as_api_error(error).response()


async def _failed(_: Request, error: Exception) -> Response:
    return ApiError(500, "the server failed on this request", code="internal_error").response()


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return ApiError(error.status_code, str(error.detail), headers=dict(error.headers or {})).response()


async def _invalid(request: Request, error: Exception) -> Response:
    """Name the first field that is wrong, one that is not known before others, without its value, and the field that a misspelled
    one is like."""
    assert isinstance(error, RequestValidationError)
    first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    where = [str(part) for part in first["loc"][1:]]
    if first["type"] == "json_invalid" or not where:
        return ApiError(400, "the body is not a JSON object with Content-Type: application/json").response()
    says = first["msg"]
    if first["type"] == "extra_forbidden":
        body = request.scope["route"].body_field.field_info.annotation
        known = body.model_fields if len(where) == 1 else names_within(Body)
        says = "; ".join(filter(None, ("is not served", hint(where[-1], known))))
    return ApiError(400, f"{'.'.join(where)}: {says}", param=where[0]).response()
