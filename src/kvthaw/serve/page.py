"""Routes of the page, and of what its answers recalled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Generator
from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from kvthaw.config import CacheConfig
from kvthaw.errors import ConfigError
from kvthaw.evaluate.variant import Variant
from kvthaw.inspect.page import asset, label, passage_data, replay_data, run_data, served, text_data, texts, words
from kvthaw.inspect.passages import RECENT, passages
from kvthaw.inspect.recorder import Recording
from kvthaw.inspect.run import Run, replay
from kvthaw.methods import METHODS, resolve
from kvthaw.serve.answers import Json
from kvthaw.serve.beside import Beside
from kvthaw.serve.bodies import BodyRoute
from kvthaw.serve.clients import client_of, service_of, while_connected
from kvthaw.serve.errors import ApiError
from kvthaw.serve.lanes import FullError
from kvthaw.serve.schema import RecallRun
from kvthaw.serve.service import MOST_RUNS, Service, refused
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
router = APIRouter(route_class=BodyRoute)


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
    return await asyncio.to_thread(_data, service, _recorded(service, name))


@router.get("/v1/recalls/{name}/passages")
async def passages_so_far(name: str, http: Request, text: bool = False) -> Json:
    """Return the passages that an answer came from up to now, also while it streams.

    text: return the text of the prompt, too.
    """
    service = service_of(http)
    return await asyncio.to_thread(_so_far, service, _recalled(service, name), text=text)


@router.post("/v1/recalls/{name}/runs")
async def run(name: str, body: RecallRun, http: Request) -> Json:
    """Send the tokens of an answer through another method or budget, and return what they recalled there. The worker takes
    steps of other requests between its chunks and tokens. One run proceeds at a time."""
    service, client = service_of(http), client_of(http)
    found = _recorded(service, name)
    body.check(service.batch.capacity)
    service.check(None, 1)
    if service.worker.lockstep.size > 1:
        raise ApiError(400, "method: a model that is split compares no methods", param="method")
    prompt, answer = found.request.spec.ids.tolist(), _answer(found)
    variant = Variant(body.method or service.batch.cache.settings.method.name, body.budget, body.retrieved)
    chunk = service.worker.scheduler.step_tokens
    steps = replay(service.batch.model, variant, prompt, answer, exact=found.exact, chunk=chunk)
    try:
        ran = await while_connected(service, _ran(service, steps, client), http.receive)
    except ConfigError as error:
        raise refused(body, error, "method") from None
    except FullError:
        raise _full() from None
    return await asyncio.to_thread(replay_data, ran, service.tokenizer, len(prompt) + len(answer), _text(prompt), answer)


async def _ran(service: Service, steps: Generator[Run], client: str) -> Run:
    """Take the steps of a run in the worker between its own, when it is the client's turn, and return the complete run.
    Raises FullError."""
    ran = list[Run]()
    async with service.replays.turn(client):
        try:
            while (more := await service.worker.call(lambda: next(steps, None))) is not None:
                ran = [more]
        finally:
            service.background(service.worker.call(steps.close))
    return ran[0]


@router.post("/v1/recalls/{name}/answers")
async def answer(name: str, body: RecallRun, http: Request) -> StreamingResponse:
    """Answer the prompt again under another method or budget, as a stream of events: pieces of text, then what was read. Chunks and
    tokens come between the steps of other requests."""
    service = service_of(http)
    found, batch = _recorded(service, name), service.batch
    body.check(batch.capacity)
    service.check(None, 1)
    if service.worker.lockstep.size > 1 or found.request.spec.embeddings is not None:
        raise ApiError(400, "method: a split model, and a prompt of embeddings, are answered under one method", param="method")
    mine = batch.cache.settings
    variant = Variant(body.method or mine.method.name, body.budget, body.retrieved)
    config = CacheConfig(block_size=mine.block_size, kv_dtype=mine.kv_dtype)
    chunk = service.worker.scheduler.step_tokens
    make = partial(Beside, batch.model, service.tokenizer, found.request, variant, config, batch.prefix_cache, chunk)
    try:
        second = await service.worker.call(make)
    except ConfigError as error:
        raise refused(body, error, "method") from None

    async def sent() -> AsyncIterator[bytes]:
        try:
            async with service.replays.turn(client_of(http)):
                async for event in second.events(service.worker):
                    yield f"data: {json.dumps(event)}\n\n".encode()
        except FullError:
            yield f"data: {json.dumps(_full().body())}\n\n".encode()

    return StreamingResponse(sent(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def _full() -> ApiError:
    says = f"{MOST_RUNS} runs wait"
    return ApiError(429, says, code="rate_limit_exceeded", headers={"Retry-After": "10"})


def _recalled(service: Service, name: str) -> Recall:
    found = service.worker.watcher.recalls.get(name)
    if found is None:
        raise ApiError(404, f"nothing is recorded of {name!r}", param="name", code="recall_not_found")
    return found


def _recorded(service: Service, name: str) -> Recall:
    found = _recalled(service, name)
    if found.open:
        raise ApiError(409, f"{name!r} has not ended", param="name", code="recall_open")
    return found


def _text(prompt: list[int]) -> list[int]:
    """Return the tokens of a prompt before its question."""
    return prompt[: len(prompt) - min(RECENT, len(prompt) // 2)]


def _answer(recall: Recall) -> list[int]:
    """Return the answer's first tokens, one for each step that is recorded."""
    return recall.request.tokens[: len(recall.recording.selected)]


def _so_far(service: Service, recall: Recall, *, text: bool) -> Json:
    prompt, selected = recall.request.spec.ids.tolist(), list(recall.recording.selected)
    if not recall.pieces:
        recall.pieces = texts(service.tokenizer, _text(prompt))
    if recall.open:
        del selected[-1:]  # which may be on its way from the device
    said = texts(service.tokenizer, recall.request.tokens[: len(selected)], prompt[-RECENT:])
    found = passages(Recording(selected), recall.pieces, said)
    told: Json = {"tokens": len(selected), "passages": [(one.start, one.stop, round(one.share, 3)) for one in found]}
    return told | (text_data(service.tokenizer, prompt, (), ()) if text else {})


def _data(service: Service, recall: Recall) -> Json:
    request, settings, answer = recall.request, service.batch.cache.settings, _answer(recall)
    prompt = request.spec.ids.tolist()
    head = text_data(service.tokenizer, prompt, (), answer)
    name, said = label(settings.method.name, settings.budget, settings.retrieved), words(service.tokenizer, answer)
    told: Json = {"said": said}
    if any(recall.recording.selected):
        told["passages"] = passage_data(recall.recording, service.tokenizer, _text(prompt), answer)
    else:
        name, told["full"] = "full attention", service.batch.cache.stats().reason
    run = run_data(name, recall.recording, request.prompt + len(answer), **told)
    methods = [name for name in METHODS if resolve(name).index is not None]
    return {"id": service.name, "title": service.name, "methods": methods, **head, "runs": [run]}
