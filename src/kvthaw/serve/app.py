"""The routes, and what applies to all of them: API keys, body size, error format, client disconnects."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from kvthaw.engine.hf.model import kv_bytes
from kvthaw.engine.tool_calls import CallReader
from kvthaw.errors import ConfigError
from kvthaw.methods import METHODS
from kvthaw.serve import contexts, page
from kvthaw.serve.answers import Answer, ChatAnswer, CompletionAnswer, Json, ResponseAnswer, scores_in, written
from kvthaw.serve.bodies import BodyRoute, invalid, large_bodies
from kvthaw.serve.errors import ERRORS, ApiError, as_api_error
from kvthaw.serve.guard import Guard
from kvthaw.serve.jobs import Job
from kvthaw.serve.request_log import RequestLog
from kvthaw.serve.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    Sampled,
    TokenizeRequest,
)
from kvthaw.serve.service import Service, attended, client_of, refused, service_of, while_connected
from kvthaw.version import __version__

Asked = TypeVar("Asked", bound=Sampled)
SAVING = 3.0
"""Seconds that documents have to be written once a server has ended all requests."""
KEEP_ALIVE = 10.0
"""Seconds without an event after which a stream sends a comment."""
MOST_VALUES, OTHER_VALUES = 1 << 20, 1 << 16
"""Most token ids in a body, unless one sequence may have more, and most other values."""

_STREAMS: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}
router = APIRouter(route_class=BodyRoute)


def create_app(service: Service, *, api_keys: Sequence[str] = (), hosts: Collection[str] | None = None) -> FastAPI:
    """Return the ASGI application. Its lifespan starts and stops the service's worker.

    api_keys, hosts: see `Guard`.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        yield
        await service.saved(SAVING)
        await service.worker.stop()

    app = FastAPI(title="kvthaw", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.service, app.state.large_bodies, app.state.most_values = service, large_bodies(), most_values(service)
    for each in (router, contexts.router, page.router):
        app.include_router(each, responses=ERRORS)
    app.add_middleware(Guard, api_keys=api_keys, hosts=hosts)
    app.add_middleware(RequestLog)
    for kind in (ApiError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _refuse)
    return app


def most_values(service: Service) -> int:
    """Return the most JSON values that the body of a request may have: OTHER_VALUES, and one for each token of all outputs.

    The tokens count up to MOST_VALUES, but at least one context length.
    """
    capacity = service.batch.capacity
    return OTHER_VALUES + max(capacity, min(MOST_VALUES, capacity * service.worker.room))


@router.post("/v1/chat/completions", responses=_STREAMS)
async def chat(body: ChatRequest, http: Request) -> Response:
    """Answer a conversation."""
    return await _converse(body, http, ChatAnswer)


@router.post("/v1/responses", responses=_STREAMS)
async def responses(body: ResponsesRequest, http: Request) -> Response:
    """Answer a conversation with a response, which the server does not keep."""
    return await _converse(body, http, ResponseAnswer)


@router.post("/v1/completions", responses=_STREAMS)
async def completions(body: CompletionRequest, http: Request) -> Response:
    """Continue texts or tokens."""
    service, body = _accepted(body, http, len(body.prompts))
    client = client_of(http)
    before = await service.context_tokens(body, client)
    encode = partial(service.encode, behind=before, client=client)
    prompts = [before + (await while_connected(http, encode(one)) if isinstance(one, str) else one) for one in body.prompts]
    return await _generate(http, body, prompts, CompletionAnswer)


@router.get("/v1/models")
async def models(http: Request) -> Json:
    """List the model that is served."""
    return {"object": "list", "data": [_card(service_of(http))]}


@router.get("/v1/models/{name:path}")
async def model(name: str, http: Request) -> Json:
    """Describe the model that is served."""
    service_of(http).check_name(name)
    return _card(service_of(http))


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, http: Request) -> Json:
    """Return the tokens of a text or a conversation."""
    service = service_of(http)
    body.check()
    if body.messages is not None:
        tokens = await service.encode_chat(body.messages, client=client_of(http))
    else:
        tokens = await service.encode(body.prompt or "", special=body.add_special_tokens, client=client_of(http))
    return {"tokens": tokens, "count": len(tokens), "max_model_len": service.batch.capacity}


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, http: Request) -> Json:
    """Return the text of tokens."""
    return {"prompt": await service_of(http).decode(body.tokens, client_of(http))}


@router.get("/health", response_class=Response)
async def health(http: Request) -> Response:
    """Return 200 if the process is alive and can compute."""
    return Response(status_code=200 if service_of(http).worker.failure is None else 503)


@router.get("/ready")
async def ready(http: Request) -> JSONResponse:
    """Return whether the server accepts requests."""
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


def _accepted(body: Asked, http: Request, prompts: int = 1) -> tuple[Service, Asked]:
    """Return the service, and the request with its defaults. Raises ApiError, before any work is done, for a request that it does
    not take."""
    service = service_of(http)
    body = body.filled(service.defaults)
    body.check()
    service.check(body.model, prompts * body.outputs)
    return service, body


async def _converse(body: ChatRequest | ResponsesRequest, http: Request, kind: type[Answer]) -> Response:
    service, body = _accepted(body, http)
    reader = service.call_reader(body)
    encode = service.encode_chat(body.messages, body, param=kind.param, client=client_of(http))
    return await _generate(http, body, [await while_connected(http, encode)], kind, reader)


async def _generate(
    http: Request,
    body: Sampled,
    prompts: Sequence[Sequence[int]],
    kind: type[Answer],
    reader: Callable[[], CallReader] | None = None,
) -> Response:
    service, client = service_of(http), client_of(http)
    answer = kind(body, prompts, service.tokenizer, service.name)
    answer.reader = reader
    try:
        sampling = body.sampling(await while_connected(http, service.grammar(body, client)))
    except ConfigError as error:
        raise refused(body, error, kind.param) from None
    job = service.submit(body, prompts, sampling, kind.param, answer.id, client)
    http.state.job, http.state.outputs = job, body.outputs
    if body.stream:
        return EventStream(http, job, _events(service, job, answer, client))
    async with attended(http, job):
        outputs = await job.whole()
    answer.warning = await service.documents.save(job)
    if outputs and outputs[-1].error is not None:
        raise as_api_error(outputs[-1].error)
    if len(outputs) < len(job.requests) or any(output.finished is None for output in outputs):
        return Response(status_code=499)  # no client reads it
    said = await service.render(lambda: written(answer.whole(outputs)), scores_in(outputs), client)
    return Response(said, media_type="application/json")


async def _events(service: Service, job: Job, answer: Answer, client: str) -> AsyncIterator[bytes]:
    """Yield server-sent events."""
    yield answer.encode(answer.opening())
    async for deltas in job.stream(KEEP_ALIVE):
        error = deltas[-1].error if deltas else None
        new = [delta for delta in deltas if delta.error is None]
        added = await service.render(partial(answer.added, new), scores_in(new), client)
        if error is not None:
            yield added + answer.encode([answer.failed(as_api_error(error))])
            return
        if added or not deltas:
            yield added or b": keep-alive\n\n"
    answer.warning = await service.documents.save(job)
    yield await service.render(lambda: answer.encode(answer.closing()), answer.repeats, client) + answer.ending


class EventStream(StreamingResponse):
    """A stream of events that cancels its job when it ends for any reason."""

    def __init__(self, http: Request, job: Job, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._http, self._job = http, job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with attended(self._http, self._job):
            await self.stream_response(send)


def _card(service: Service) -> Json:
    batch = service.batch
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "kvthaw",
        "max_model_len": batch.capacity,
        "chat_template": service.chats,
        "method": batch.method,
        "methods": [*METHODS],
        "kv_bytes_per_token": kv_bytes(batch.model, (one.number for one in batch.cache.kv.layers if one.keeps_all)),
    }


async def _refuse(http: Request, error: Exception) -> Response:
    """Log an error and return its response."""
    if isinstance(error, RequestValidationError):
        error = invalid(error)
    elif isinstance(error, HTTPException):
        says = f"{http.method} {http.url.path} is not served; /openapi.json lists what is"
        known = error.status_code != 404
        error = ApiError(
            error.status_code, error.detail if known else says, headers=dict(error.headers or {}) if known else None
        )
    elif not isinstance(error, ApiError):
        error = ApiError(500, "the server failed on this request", code="internal_error")
    http.state.error = str(error)
    return error.response()
