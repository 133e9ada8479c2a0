"""Routes of the page, of what its answers recalled, and of recorded prompts that are read once more under another method."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Generator
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from torch import Tensor

from kvthaw.answering import Answer
from kvthaw.config import CacheConfig
from kvthaw.engine.batch import Batch
from kvthaw.engine.hf import Cache
from kvthaw.engine.prefill import chunks
from kvthaw.errors import CacheError, ConfigError
from kvthaw.evaluate.variant import Variant, check_retrieves
from kvthaw.inspect.page import asset, label, passage_data, replay_data, run_data, served, text_data, texts, words
from kvthaw.inspect.passages import RECENT, before_question, passages
from kvthaw.inspect.recorder import Recorder, Recording
from kvthaw.inspect.run import Run, record
from kvthaw.methods import METHODS, resolve
from kvthaw.serve.answers import Json
from kvthaw.serve.bodies import BodyRoute
from kvthaw.serve.errors import ApiError, as_api_error, busy
from kvthaw.serve.lanes import FullError
from kvthaw.serve.schema import RecallRun
from kvthaw.serve.service import MOST_RUNS, Service, client_of, refused, service_of, while_connected
from kvthaw.serve.watcher import MOST_TOKENS, Recall

Step = TypeVar("Step")
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


async def page(http: Request) -> Response:
    """Return a file of the page."""
    path = http.url.path
    return Response(served() if path == "/" else asset(path[1:]), media_type=FILES[path], headers=_HEADERS)


for each in FILES:
    router.add_api_route(each, page, include_in_schema=False)


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
    service = service_of(http)
    found, how = _again(service, name, body)
    steps = await _begun(service, body, replay(service.batch, found, *how))

    async def last() -> Run:
        return [ran async for ran in _steps(service, steps, client_of(http))][-1]

    ran = await while_connected(http, last())
    text, answer = before_question(found.prompt), found.answer
    return await asyncio.to_thread(replay_data, ran, service.tokenizer, len(found.prompt) + len(answer), text, answer)


@router.post("/v1/recalls/{name}/answers")
async def answer(name: str, body: RecallRun, http: Request) -> StreamingResponse:
    """Answer the prompt again under another method or budget, as a stream of events: pieces of text, then what was read. Chunks and
    tokens come between the steps of other requests."""
    service = service_of(http)
    found, how = _again(service, name, body)
    steps = await _begun(service, body, second_answer(service.batch, service.tokenizer, found, *how))

    async def sent() -> AsyncIterator[bytes]:
        try:
            async for event in _steps(service, steps, client_of(http)):
                if event:
                    yield f"data: {json.dumps(event)}\n\n".encode()
        except Exception as error:
            yield f"data: {json.dumps(as_api_error(error).body())}\n\n".encode()

    return StreamingResponse(sent(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def _again(service: Service, name: str, body: RecallRun) -> tuple[Recall, tuple[Variant, int]]:
    """Return the recording to repeat, and the method and the tokens of a step by which to repeat it. Raises ApiError."""
    found, batch = _recorded(service, name), service.batch
    body.check(batch.capacity)
    service.check(None, 1)
    if service.worker.lockstep.size > 1:
        raise ApiError(400, "method: a model that is split compares no methods", param="method")
    variant = Variant(body.method or batch.cache.settings.method.name, body.budget, body.retrieved)
    return found, (variant, service.worker.scheduler.step_tokens)


async def _begun(service: Service, body: RecallRun, steps: Generator[Step]) -> Generator[Step]:
    """Take the first step, which makes the cache. Raises ApiError for settings that no cache takes."""
    try:
        await service.worker.call(lambda: next(steps))
    except ConfigError as error:
        raise refused(body, error, "method") from None
    return steps


async def _steps(service: Service, steps: Generator[Step], client: str) -> AsyncIterator[Step]:
    """Take steps in the worker between its own, when it is the client's turn. Raises ApiError if too many wait."""
    try:
        async with service.replays.turn(client):
            try:
                while (step := await service.worker.call(lambda: next(steps, None))) is not None:
                    yield step
            finally:
                service.background(service.worker.call(steps.close))
    except FullError:
        raise busy(f"{MOST_RUNS} runs wait", 10) from None


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


def _so_far(service: Service, recall: Recall, *, text: bool) -> Json:
    prompt, selected = recall.prompt, list(recall.recording.selected)
    if not recall.pieces:
        recall.pieces = texts(service.tokenizer, before_question(prompt))
    if recall.open:
        del selected[-1:]  # which may be on its way from the device
    said = texts(service.tokenizer, recall.request.tokens[: len(selected)], prompt[-RECENT:])
    found = passages(Recording(selected), recall.pieces, said)
    told: Json = {"tokens": len(selected), "passages": [(one.start, one.stop, round(one.share, 3)) for one in found]}
    return told | (text_data(service.tokenizer, prompt, (), ()) if text else {})


def _data(service: Service, recall: Recall) -> Json:
    settings, prompt, answer = service.batch.cache.settings, recall.prompt, recall.answer
    head = text_data(service.tokenizer, prompt, (), answer)
    name, said = label(Variant(settings.method.name, settings.budget, settings.retrieved)), words(service.tokenizer, answer)
    told: Json = {"said": said}
    if any(recall.recording.selected):
        told["passages"] = passage_data(recall.recording, service.tokenizer, before_question(prompt), answer)
    else:
        name, told["full"] = "full attention", service.batch.cache.stats().reason
    run = run_data(name, recall.recording, len(prompt) + len(answer), **told)
    methods = [name for name in METHODS if resolve(name).index is not None]
    return {"id": service.name, "title": service.name, "methods": methods, **head, "runs": [run]}


def _prefilled(
    batch: Batch, recall: Recall, variant: Variant, chunk: int, step: Step
) -> Generator[Step, None, tuple[Cache, Tensor]]:
    """Yield `step` for the empty cache and for each chunk of the prompt. Returns the cache and the logits [V] after the prompt.

    The batch's prefix cache may have the prompt's KV, or a part of it. Raises ConfigError, before the first step, for settings that
    no cache takes.
    """
    mine, spec, dense, logits, taken = batch.cache.settings, recall.request.spec, variant.resolved.dense, torch.empty(0), 0
    own: Any = {"kv_dtype": None} if dense else {"budget": variant.budget, "retrieved": variant.retrieved}
    config = CacheConfig(block_size=mine.block_size, kv_dtype=mine.kv_dtype)
    cache = Cache(batch.model, variant.resolved, config=replace(config, **own))
    yield step
    if batch.prefix_cache is not None:
        with torch.inference_mode(False), torch.no_grad(), suppress(CacheError):  # which keeps rows of another kv_dtype
            taken = batch.prefix_cache.fill(cache.kv, spec.ids, salt=spec.salt)
    for after in chunks(batch.model, cache, recall.prompt[taken:], chunk=chunk):
        logits = after
        yield step
    cache.wait()
    return cache, logits


def replay(batch: Batch, recall: Recall, variant: Variant, chunk: int) -> Generator[Run]:
    """Send the tokens of an answer through another method. The last step completes the run.

    chunk: tokens of the prompt that a step takes.

    Raises ConfigError, before the first step, for a method that retrieves nothing.
    """
    check_retrieves(variant)
    run, answer = Run(variant), recall.answer
    cache, logits = yield from _prefilled(batch, recall, variant, chunk, run)
    for _ in record(batch.model, cache, (), logits, run, answer, recall.exact, frozenset(), len(answer)):
        yield run


def second_answer(batch: Batch, tokenizer: Any, recall: Recall, variant: Variant, chunk: int) -> Generator[Json]:
    """Answer the prompt again under another method: yield pieces of text, at the end what the answer read and recalled.

    chunk: as for replay().
    """
    cache, logits = yield from _prefilled(batch, recall, variant, chunk, {})
    prompt, spec, recorder, recording = recall.prompt, recall.request.spec, Recorder(cache.kv), Recording()
    sampling = replace(spec.sampling, max_tokens=min(spec.limit, MOST_TOKENS), grammar=None)
    how: Any = {"sampling": sampling, "prompt": prompt, "after": spec.text_after, "stops": spec.stop}
    answer = Answer(batch.model, tokenizer, cache, logits, **how)
    for piece in answer:
        recording.follow(len(answer.tokens), recorder)
        yield {"text": piece} if piece else {}
    found, name = recording.selected, "full attention" if variant.resolved.dense else label(variant)
    told: Json = {"name": name, "finish": answer.finish, "tokens": len(prompt) + len(found)}
    counts = [(rows >= 0).sum(-1).float().mean().item() for step in found for rows in step.values()]
    if counts:
        told["rows"] = sum(counts) / len(counts)
        told["passages"] = passage_data(recording, tokenizer, before_question(prompt), answer.tokens)
    yield told
