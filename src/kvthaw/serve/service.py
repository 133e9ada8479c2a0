"""What the routes stand on: a model, its tokenizer and chat template, the worker, and the limits of one request."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
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
from kvthaw.errors import ConfigError, QueueFullError
from kvthaw.serve.coming import Coming
from kvthaw.serve.compilers import Compilers
from kvthaw.serve.errors import ApiError, shutting_down, too_long
from kvthaw.serve.fields import Body
from kvthaw.serve.jobs import Job
from kvthaw.serve.metrics import Metrics
from kvthaw.serve.reader import Reader
from kvthaw.serve.schema import CompletionRequest, Message, Sampled
from kvthaw.serve.turns import Turns, document_of
from kvthaw.serve.watcher import Watcher
from kvthaw.serve.worker import Worker

Result = TypeVar("Result")
_log = logging.getLogger(__name__)
FOLLOWED = 64
"""Last tokens of a prompt that tell how a text goes on behind it."""


class Service:
    """Serves one model under one name.

    batch: has no requests of its own. chat_template: Jinja; None for the tokenizer's. max_waiting: how many requests may wait for a
    place; more are told to come again. library: keeps prompts with a name on disk; those that it has are taken up. defaults:
    of fields that requests leave out, instead of OpenAI's. The other
    processes of a model that is split make a `Lockstep` at the same time, and follow.
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
        self.besides = asyncio.Lock()  # one second answer at a time
        self.ending = asyncio.Event()  # set: those whose prompts are not submitted wait for nothing
        self._compilers = Compilers(tokenizer, batch.vocabulary, lambda source: self.worker.tell(Compile(source)))
        self._reader = Reader(tokenizer, batch.capacity)
        self.turns = Turns(tokenizer, chat_template)
        self._library = library
        self._locks: WeakValueDictionary[Key, asyncio.Lock] = WeakValueDictionary()  # one reads, writes or deletes at a time
        self.coming = Coming()
        self._writing: set[Key] = set()
        self._tasks: set[asyncio.Task[Any]] = set()  # that go on without who began them
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
        if not self.ready:
            raise shutting_down()
        if outputs > self.worker.room:
            raise ApiError(
                400, f"the request wants {outputs} outputs; this server gives {self.worker.room} at a time", param="n"
            )
        try:
            self.worker.check_room(outputs)
        except QueueFullError as error:
            raise ApiError(429, str(error), code="rate_limit_exceeded", headers={"Retry-After": "1"}) from None

    async def encode(
        self, text: str, *, special: bool = True, behind: Sequence[int] = (), param: str = "prompt", client: str = ""
    ) -> list[int]:
        """Return the tokens of a text, which threads find when it is the client's turn. behind: tokens that it goes on, without
        special ones then. Raises ApiError, which names param, for a text that has far too many."""
        read = partial(self._reader.tokens, text, param, special=special, behind=behind)
        return await self._reader.run(read, len(text), client)

    async def encode_document(self, text: str, client: str) -> list[int]:
        """Return the tokens of a document that conversations are about, as far as the first question; raises ApiError."""
        opened = self.turns.opened(text) if self.chats else text
        return await self.encode(opened, special=not self.chats, param="document", client=client)

    async def decode(self, tokens: Sequence[int], client: str) -> str:
        """Return the text of tokens."""
        decode = partial(self.tokenizer.decode, tokens, clean_up_tokenization_spaces=False)
        return str(await self._reader.run(decode, len(tokens), client))

    def kept(self, salt: str = "") -> dict[str, Entry]:
        """Return the prompts of a salt that are kept under names; raises ApiError where none can be."""
        if self.batch.prefix_cache is None:
            raise ApiError(400, "this server keeps no prompts", param="context")
        return {name: entry for (own, name), entry in self.batch.prefix_cache.entries.items() if own == salt}

    def save(self, job: Job) -> asyncio.Future[str | None]:
        """Have what a job keeps under a name be there after a restart, where there is a folder. Goes on without its caller. Returns
        what to tell the client where it cannot be written."""
        named = None if self._library is None else next((one for one in job.requests if one.name is not None), None)
        if named is not None:
            return self.background(self._save((named.salt, named.name or "")))
        nothing: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        nothing.set_result(None)
        return nothing

    @property
    def busy(self) -> bool:
        """Whether requests are served, or what they keep is written."""
        return bool(self.worker.open or self._tasks)

    async def saved(self, seconds: float) -> None:
        """Wait for what goes on without its callers, at most so long."""
        ends = time.monotonic() + seconds
        while self._tasks and self.worker.failure is None and (left := ends - time.monotonic()) > 0:
            await asyncio.wait(self._tasks, timeout=min(1, left))
        if self._tasks:
            _log.warning("the server ends before it has written %s", ", ".join(sorted(repr(name) for _, name in self._writing)))

    def background(self, work: Coroutine[Any, Any, Result]) -> asyncio.Future[Result]:
        """Return what awaits work that goes on where nobody awaits it any longer."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return asyncio.shield(task)

    async def forget(self, key: Key) -> None:
        """Let a prompt that is kept under a name go; raises ApiError, with all as it was, where its files stay."""
        if (error := await self.background(self._forget(key))) is not None:
            says = f"the context {key[1]!r} is kept: its files cannot be deleted: {error.strerror or error}"
            raise ApiError(500, says, param="name", code="context_not_deleted")

    async def refresh(self, key: Key) -> None:
        """Take up a prompt that another server kept under a name in the same folder, or let go one that it deleted."""
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
        entry = self.kept(key[0]).get(key[1])
        if entry is None:
            raise ApiError(404, f"no context is named {body.context!r}", param="context", code="context_not_found")
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
        if entry is None:
            encode = partial(self.turns.encode, read, messages, answer=answer)
        elif isinstance(entry.about, list):
            before = [Message.model_validate(each) for each in entry.about]
            encode = partial(self.turns.after_messages, read, entry.ids.tolist(), before, messages)
        else:
            encode = partial(self.turns.after_document, read, entry.ids.tolist(), entry.about, messages)
        size = sum(len(message.plain()["content"]) for message in messages) + (0 if entry is None else len(entry.ids))
        try:
            return await self._reader.run(encode, size, client)
        except ConfigError as error:
            raise ApiError(400, str(error), param=param) from None

    async def grammar(self, body: Sampled, client: str) -> Grammar | None:
        """Return the grammar of the JSON that a request asks for, None for any text. Raises ApiError."""
        asked = body.json_format
        return None if asked is None else await self._compilers.grammar(asked, body.format_field, client)

    def submit(self, body: Sampled, prompts: Sequence[Sequence[int]], sampling: Sampling, param: str, name: str) -> Job:
        """Let each prompt wait for its n outputs. param: the field that the prompts are of; name: the answer's. Raises ApiError."""
        limit = self.batch.capacity
        for ids in prompts:
            if len(ids) + (sampling.max_tokens or 1) > limit:
                raise too_long(len(ids), sampling.max_tokens or 1, limit, param)
        samplings = sampling.split(body.outputs)
        tensors = [torch.from_numpy(np.array(ids, dtype=np.int64)) for ids in prompts]  # numpy reads lists faster than torch
        afters = [list(ids[-FOLLOWED:]) if isinstance(body, CompletionRequest) else [] for ids in prompts]
        try:
            requests = [
                self.batch.request(ids, sampling=one, tokenizer=self.tokenizer, text_after=after, cache_salt=body.cache_salt)
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
        self.check(None, len(requests))  # others may have come while the prompts were tokenized
        if body.recall is not None:
            self.worker.watcher.record(name, requests[0], exact=body.recall == "exact")
        return self.worker.submit(requests)

    def _lock(self, key: Key) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())

    @asynccontextmanager
    async def _changing(self, key: Key) -> AsyncIterator[None]:
        """Be the only one who writes or deletes files of a name; who asks for the prompt meanwhile gets what memory has."""
        async with self._lock(key):
            self._writing.add(key)
            try:
                yield
            finally:
                self._writing.discard(key)

    async def _save(self, key: Key) -> str | None:
        """Write what memory has under a name when its turn comes: nothing where that was deleted, and of several the last.
        Returns what to say where it cannot be written."""
        library = self._library
        assert library is not None
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
    """Return what a client is told of a setting that the engine refuses, by the first field that the message names."""
    words = [param if word == "prompt" else word for word in re.findall(r"\w+", str(error))]
    return ApiError(400, str(error), param=next((word for word in words if word in type(body).model_fields), None))


def _about(about: Any) -> Any:
    """Return what was saved about a context: its messages, or its document, or None. Raises where it is none of them."""
    if document_of(about) is None:
        for each in () if about is None else about:
            Message.model_validate(each)
    return about
