"""The service behind the routes: a model, its tokenizer and chat template, the worker, and the limits of a request."""

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
from weakref import WeakValueDictionary

import numpy as np
import torch

from kvthaw.cache.prefix_kept import Entry, Key
from kvthaw.engine.batch import Batch
from kvthaw.engine.grammar import Grammar
from kvthaw.engine.library import Library
from kvthaw.engine.lockstep import Compile, Lockstep
from kvthaw.engine.request import hidden_salt
from kvthaw.engine.sampling import Sampling
from kvthaw.engine.scheduler import Scheduler
from kvthaw.engine.text import decode
from kvthaw.engine.tool_calls import CallReader, ToolFormat
from kvthaw.errors import ConfigError, hint
from kvthaw.serve.coming import Coming
from kvthaw.serve.compilers import Compilers
from kvthaw.serve.errors import ApiError, shutting_down, too_long
from kvthaw.serve.fields import Body
from kvthaw.serve.jobs import Job
from kvthaw.serve.lanes import Share
from kvthaw.serve.metrics import Metrics
from kvthaw.serve.reader import Reader
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
    library: keeps named prompts on disk. The service restores its prompts.
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
        self._library = library
        self._locks: WeakValueDictionary[Key, asyncio.Lock] = WeakValueDictionary()  # one reads, writes or deletes at a time
        self.coming = Coming()
        self._writing: set[Key] = set()
        self._tasks: set[asyncio.Task[Any]] = set()  # that continue without their callers
        if library is not None:
            library.restore(_about)

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
        if model not in (None, self.name):
            raise ApiError(404, f"the model {model!r} is not served; {self.name!r} is", param="model", code="model_not_found")
        if outputs > self.worker.room:
            raise ApiError(
                400, f"the request wants {outputs} outputs; this server gives {self.worker.room} at a time", param="n"
            )
        self.admit(outputs)

    def admit(self, outputs: int) -> None:
        """Raise ApiError if there is no room now for a request of `outputs` outputs. `Worker.submit` needs it again, because others
        may have come while a prompt was tokenized."""
        if not self.ready:
            raise shutting_down()
        if (full := self.worker.full(outputs)) is not None:
            raise ApiError(429, full, code="rate_limit_exceeded", headers={"Retry-After": "1"})

    async def encode(
        self, text: str, *, special: bool = True, behind: Sequence[int] = (), param: str = "prompt", client: str = ""
    ) -> list[int]:
        """Return the tokens of a text, computed in a thread when it is the client's turn.

        behind: tokens that precede the text. The text then gets no special tokens.

        Raises ApiError, with param, for a text with far too many tokens.
        """
        read = partial(self._reader.tokens, text, param, special=special, behind=behind)
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

    def kept(self, salt: str = "") -> dict[str, Entry]:
        """Return the named prompts of a salt. Raises ApiError if the server keeps no prompts."""
        if self.batch.prefix_cache is None:
            raise ApiError(400, "this server keeps no prompts", param="context")
        return {name: entry for (own, name), entry in self.batch.prefix_cache.entries.items() if own == salt}

    def save(self, job: Job) -> asyncio.Future[str | None]:
        """Save a job's named prompt to the folder, if any, so that it survives a restart. The save continues if the caller is
        cancelled. Returns an error message for the client if a file cannot be written."""
        named = next((one for one in job.requests if one.name is not None), None)
        if self._library is not None and named is not None and not job.cut_short:
            return self.background(self._save(self._library, (named.salt, named.name or "")))
        nothing: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        nothing.set_result(None)
        return nothing

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
            _log.warning("the server ends before it has written %s", ", ".join(sorted(repr(name) for _, name in self._writing)))

    def background(self, work: Coroutine[Any, Any, Result]) -> asyncio.Future[Result]:
        """Return a future of work that continues if the future is cancelled."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return asyncio.shield(task)

    async def forget(self, key: Key) -> None:
        """Delete a named prompt. Raises ApiError, and changes nothing, if its files cannot be deleted."""
        if (error := await self.background(self._forget(key))) is not None:
            says = f"the context {key[1]!r} is kept: its files cannot be deleted: {error.strerror or error}"
            raise ApiError(500, says, param="name", code="context_not_deleted")

    async def refresh(self, key: Key) -> None:
        """Load a named prompt that another server saved in the same folder, or drop one that it deleted."""
        library = self._library
        if library is not None and key not in self._writing:
            async with self._lock(key):
                if library.changed(key):
                    await self.worker.call(partial(library.refresh, key, _about))

    def has_files(self, key: Key) -> bool:
        """Return whether there are files of a prompt, be they damaged."""
        return self._library is not None and self._library.holds(key)

    async def context(self, body: Sampled) -> Entry | None:
        """Return the context that a request names, None without one; raises ApiError."""
        if body.context is None:
            return None
        key = hidden_salt(body.cache_salt), body.context  # another tenant's is none
        await self.refresh(key)
        kept = self.kept(key[0])
        entry = kept.get(key[1])
        if entry is None:
            near = hint(body.context, kept)
            said = f"no context is named {body.context!r}" + (f"; {near}" if near else "")
            raise ApiError(404, said, param="context", code="context_not_found")
        return entry

    async def context_tokens(self, body: Sampled, client: str = "") -> list[int]:
        """Return the tokens that a text follows in the context that a request names, none without one; raises ApiError."""
        entry = await self.context(body)
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
        entry = None if body is None else await self.context(body)
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
            return await self._compilers.calls(self._tool_format(), rules, client)
        return None if asked is None else await self._compilers.grammar(asked, body.format_field, client)

    def call_reader(self, body: Sampled) -> Callable[[], CallReader] | None:
        """Return what makes a reader of an output's tool calls, None for a request without tools. Raises ApiError if the model
        takes none, or writes calls in a form that is not served."""
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
        limit = self.batch.capacity
        for ids in prompts:
            if len(ids) + (sampling.max_tokens or 1) > limit:
                raise too_long(len(ids), sampling.max_tokens or 1, limit, param)
        samplings = sampling.split(body.outputs)
        tensors = [torch.from_numpy(np.array(ids, dtype=np.int64)) for ids in prompts]  # numpy reads lists faster than torch
        afters = [list(ids[-FOLLOWED:]) if isinstance(body, CompletionRequest) else [] for ids in prompts]
        try:
            requests = [
                self.batch.request(
                    ids, sampling=one, tokenizer=self.tokenizer, text_after=after, cache_salt=body.cache_salt, client=client
                )
                for ids, after in zip(tensors, afters, strict=True)
                for one in samplings
            ]
        except ConfigError as error:
            raise refused(body, error, param) from None
        if body.kv_name is not None:
            self.kept()
            if len(prompts) > 1:
                raise ApiError(400, f"kv_name is given with {len(prompts)} prompts; it names one", param="kv_name")
            requests[0].name = body.kv_name
        if body.recall is not None and len(prompts) > 1:
            raise ApiError(400, f"recall is given with {len(prompts)} prompts; one is recorded", param="recall")
        self.admit(len(requests))
        if body.recall is not None:
            self.worker.watcher.record(name, requests[0], exact=body.recall == "exact")
        return self.worker.submit(requests)

    def _lock(self, key: Key) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())

    @asynccontextmanager
    async def _changing(self, key: Key) -> AsyncIterator[None]:
        """Exclude all others from writing or deleting the files of a name. Requests for the prompt get the one in memory
        meanwhile."""
        async with self._lock(key):
            self._writing.add(key)
            try:
                yield
            finally:
                self._writing.discard(key)

    async def _save(self, library: Library, key: Key) -> str | None:
        """Write the prompt that is in memory under a name, in turn. A deleted prompt is not written; of several, the last is.
        Returns an error message if a file cannot be written."""
        async with self._changing(key):
            try:
                what = await self.worker.call(partial(library.collect, key)) if self.worker.failure is None else None
                if what is not None:
                    await asyncio.to_thread(library.write, what)
                return None
            except OSError as error:
                reason = error.strerror or str(error)
                _log.warning("the context %r is in memory alone: %s", key[1], error)
            except Exception as error:
                reason = type(error).__name__
                _log.exception("the context %r is in memory alone", key[1])
        return (
            f"the context {key[1]!r} is in memory alone, and not there after a restart: its files cannot be written: {reason}"
        )

    async def _forget(self, key: Key) -> OSError | None:
        async with self._changing(key):
            try:
                if self._library is not None:
                    await asyncio.to_thread(self._library.delete, key)
            except OSError as error:
                return error
            await self.worker.forget(key)
            return None


def refused(body: Body, error: ConfigError, param: str) -> ApiError:
    """Return the error response for a setting that the engine rejects, with the first field in its message."""
    words = [param if word == "prompt" else word for word in re.findall(r"\w+", str(error))]
    return ApiError(400, str(error), param=next((word for word in words if word in type(body).model_fields), None))


def _about(about: Any) -> Any:
    """Check the saved description of a context: messages, a document, or None. Raises for any other value."""
    if document_of(about) is None:
        for each in () if about is None else about:
            Message.model_validate(each)
    return about
