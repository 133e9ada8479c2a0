"""The service behind the routes: a model, its tokenizer and chat template, the worker, the limits of a request; and its clients."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
from fastapi import Request
from starlette.types import Receive

from kvthaw.engine.batch import Batch
from kvthaw.engine.grammar import Grammar, Grammars
from kvthaw.engine.library import Library
from kvthaw.engine.lockstep import Compile, Lockstep
from kvthaw.engine.sampling import Sampling
from kvthaw.engine.scheduler import Scheduler
from kvthaw.engine.text import decode
from kvthaw.engine.tool_calls import CallReader, ToolFormat
from kvthaw.errors import ConfigError, TooLongError
from kvthaw.serve.compilers import Compilers
from kvthaw.serve.documents import Documents
from kvthaw.serve.errors import ApiError, busy, client_left, shutting_down, too_long
from kvthaw.serve.fields import Body
from kvthaw.serve.jobs import Job
from kvthaw.serve.lanes import Reader, Share
from kvthaw.serve.metrics import Metrics
from kvthaw.serve.schema import CompletionRequest, Message, Sampled
from kvthaw.serve.turns import Turns, document_of
from kvthaw.serve.watcher import Watcher
from kvthaw.serve.worker import Worker

Result = TypeVar("Result")
_log = logging.getLogger(__name__)
SCORES = 64
"""Tokens whose log-probabilities the event loop writes at once; each comes with up to 20 others."""
LETTERS = 512
"""Characters of JSON that the log-probabilities of a token take, about."""
MOST_RUNS = 16
"""How many recordings may wait to be compared with another method."""
FOLLOWED = 64
"""Last tokens of a prompt that determine the tokenization of the text behind it."""


class Service:
    """Serve one model under one name.

    batch: a batch without requests.
    chat_template: Jinja; None for the tokenizer's.
    max_waiting: most requests that may wait for a slot. The server rejects more with a request to retry.
    library: keeps named prompts on disk; see `Documents`.
    defaults: values of omitted fields, instead of OpenAI's.

    The other processes of a split model create a `Lockstep` at the same time, and follow.
    """

    def __init__(
        self,
        batch: Batch,
        tokenizer: Any,
        name: str,
        *,
        chat_template: str | None = None,
        max_waiting: int = 64,
        library: Library | None = None,
        defaults: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self.batch, self.tokenizer, self.name, self.created = batch, tokenizer, name, int(time.time())
        self.defaults = defaults
        scheduler = Scheduler(batch)
        metrics = Metrics(scheduler, name)
        self.worker = Worker(
            scheduler,
            metrics,
            Watcher(batch, metrics.attention_mass.observe),
            batch.max_seqs + max_waiting,
            Lockstep(batch.cache.kv.settings.ranks),
        )
        self.ending = asyncio.Event()  # set: those whose prompts are not submitted wait for nothing
        self._compilers = Compilers(tokenizer, batch.vocabulary, lambda source: self.worker.tell(Compile(source)))
        self._reader = Reader(tokenizer, batch.capacity)
        self.turns = Turns(tokenizer, chat_template)
        self.replays = Share(1.0, MOST_RUNS)
        self._tasks: set[asyncio.Task[Any]] = set()  # that continue without their callers
        self.documents = Documents(batch.prefix_cache, library, self.worker, self.background)

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return not self.worker.draining and self.worker.failure is None

    @property
    def chats(self) -> bool:
        """Whether there is a chat template."""
        return self.turns.possible

    def check(self, model: str | None, outputs: int) -> None:
        """Raise ApiError, before any work is done, for a model that is not served and for more outputs than there is room for."""
        self.check_name(model)
        if outputs > self.worker.room:
            raise ApiError(
                400, f"the request wants {outputs} outputs; this server gives {self.worker.room} at a time", param="n"
            )
        self.admit(outputs)

    def check_name(self, model: str | None) -> None:
        """Raise ApiError for the name of a model that is not served."""
        if model not in (None, self.name):
            raise ApiError(404, f"the model {model!r} is not served; {self.name!r} is", param="model", code="model_not_found")

    def admit(self, outputs: int) -> None:
        """Raise ApiError if there is no room now for a request of `outputs` outputs. `Worker.submit` needs it again, because others
        may have come while a prompt was tokenized."""
        if not self.ready:
            raise shutting_down()
        if (full := self.worker.full(outputs)) is not None:
            raise busy(full)

    async def encode(
        self, text: str, *, special: bool = True, behind: Sequence[int] = (), param: str = "prompt", client: str = ""
    ) -> list[int]:
        """Return the tokens of a text, computed in a thread when it is the client's turn.

        behind: tokens that precede the text. The text then gets no special tokens.

        Raises ApiError, with param, for a text with far too many tokens.
        """
        read = partial(self._reader.tokens, text, behind, param=param, special=special)
        return await self._reader.run(read, len(text), client)

    async def encode_document(self, text: str, client: str) -> list[int]:
        """Return the tokens of a document that conversations are about, up to the first question; raises ApiError."""
        opened = self.turns.opened(text) if self.chats else text
        return await self.encode(opened, special=not self.chats, param="document", client=client)

    async def render(self, work: Callable[[], Result], scores: int, client: str) -> Result:
        """Run work that writes the log-probabilities of `scores` tokens, and return its result. Above SCORES tokens a thread
        runs it when it is the client's turn."""
        return work() if scores <= SCORES else await self._reader.run(work, scores * LETTERS, client)

    async def decode(self, tokens: Sequence[int], client: str) -> str:
        """Return the text of tokens."""
        return await self._reader.run(partial(decode, self.tokenizer, tokens), len(tokens), client)

    @property
    def busy(self) -> bool:
        """Whether requests run or prompts are being saved."""
        return bool(self.worker.open or self._tasks)

    async def saved(self, seconds: float) -> None:
        """Wait for background work, at most `seconds`."""
        ends = time.monotonic() + seconds
        while self._tasks and self.worker.failure is None and (left := ends - time.monotonic()) > 0:
            await asyncio.wait(self._tasks, timeout=min(1, left))
        if self._tasks:
            _log.warning(
                "the server ends before it has written %s", ", ".join(sorted(repr(name) for _, name in self.documents.writing))
            )

    def background(self, work: Coroutine[Any, Any, Result]) -> asyncio.Future[Result]:
        """Return a future of work that continues if the future is cancelled."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return asyncio.shield(task)

    async def context_tokens(self, body: Sampled, client: str = "") -> list[int]:
        """Return the tokens that a text follows in the context that a request names, none without one; raises ApiError."""
        entry = await self.documents.named(body.context, body.cache_salt)
        if entry is not None and (document := document_of(entry.about)) is not None:
            return await self.encode(document, param="context", client=client)
        return [] if entry is None else list(entry.ids.tolist())

    async def encode_chat(
        self,
        messages: Sequence[Message],
        body: Sampled | None = None,
        *,
        answer: bool = True,
        param: str = "messages",
        client: str = "",
    ) -> list[int]:
        """Return the tokens of a conversation, with answer up to where the answer begins, behind the context that a request names;
        raises ApiError, which names param."""
        read = partial(self._reader.tokens, param=param)
        entry = None if body is None else await self.documents.named(body.context, body.cache_salt)
        turns = self.turns.having([] if body is None else body.plain_tools)
        if entry is None:
            encode = partial(turns.encode, read, messages, answer=answer)
        elif isinstance(entry.about, list):
            before = [Message.model_validate(each) for each in entry.about]
            encode = partial(turns.after_messages, read, entry.ids.tolist(), before, messages)
        else:
            encode = partial(turns.after_document, read, entry.ids.tolist(), entry.about, messages)
        size = sum(message.size for message in messages) + (0 if entry is None else len(entry.ids))
        try:
            return await self._reader.run(encode, size, client)
        except ConfigError as error:
            raise ApiError(400, str(error), param=param) from None

    async def grammar(self, body: Sampled, client: str) -> Grammar | None:
        """Return the grammar of the JSON or of the calls that a request asks for, None for any text. Raises ApiError."""
        asked, rules = body.json_format, body.call_rules
        if rules is not None:
            form = self._tool_format()
            return await self._compilers.grammar(lambda grammars: grammars.read_calls(form, rules), "tools", client)
        if asked is None:
            return None
        read = partial(Grammars.read, schema=asked.schema_, strict=asked.strict)
        return await self._compilers.grammar(read, body.format_field, client)

    def call_reader(self, body: Sampled) -> Callable[[], CallReader] | None:
        """Return a function that makes the reader of an output's tool calls; None for a request without tools.

        Raises ApiError if the model takes no tools, or writes calls in a form that is not served."""
        if not body.plain_tools:
            return None
        return partial(CallReader, self._tool_format(), body.call_names, certain=body.call_rules is not None)

    def _tool_format(self) -> ToolFormat:
        try:
            return self.turns.tool_format()
        except ConfigError as error:
            raise ApiError(400, f"tools are not served for the model {self.name!r}: {error}", param="tools") from None

    def submit(
        self, body: Sampled, prompts: Sequence[Sequence[int]], sampling: Sampling, param: str, name: str, client: str
    ) -> Job:
        """Queue n outputs for each prompt. Raises ApiError.

        param: the field of the prompts.
        name: name of the answer.
        client: the slots and the prefill are shared between clients.
        """
        samplings = sampling.split(body.outputs)
        tensors = [torch.from_numpy(np.array(ids, dtype=np.int64)) for ids in prompts]  # numpy reads lists faster than torch
        afters = [list(ids[-FOLLOWED:]) if isinstance(body, CompletionRequest) else [] for ids in prompts]
        how: dict[str, Any] = {"tokenizer": self.tokenizer, "cache_salt": body.cache_salt, "client": client}
        names = iter([body.kv_name])  # of the first output
        try:
            requests = [
                self.batch.request(ids, sampling=one, text_after=after, name=next(names, None), **how)
                for ids, after in zip(tensors, afters, strict=True)
                for one in samplings
            ]
        except ConfigError as error:
            raise refused(body, error, param) from None
        if body.kv_name is not None:
            self.documents.kept()
            if len(prompts) > 1:
                raise ApiError(400, f"kv_name is given with {len(prompts)} prompts; it names one", param="kv_name")
        if body.recall is not None and len(prompts) > 1:
            raise ApiError(400, f"recall is given with {len(prompts)} prompts; one is recorded", param="recall")
        self.admit(len(requests))
        if body.recall is not None:
            self.worker.watcher.record(name, requests[0], exact=body.recall == "exact")
        return self.worker.submit(requests)


def refused(body: Body, error: ConfigError, param: str) -> ApiError:
    """Return the error response for a setting that the engine rejects, with the first field in its message."""
    if isinstance(error, TooLongError):
        return too_long(error, param)
    words = [param if word == "prompt" else word for word in re.findall(r"\w+", str(error))]
    return ApiError(400, str(error), param=next((word for word in words if word in type(body).model_fields), None))


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
