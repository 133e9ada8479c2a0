"""What the routes stand on: a model, its tokenizer and chat template, the worker, and the limits of one request."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError

from kvthaw.cache.prefix_kept import Entry
from kvthaw.engine.batch import Batch
from kvthaw.engine.grammar import Grammar, Grammars
from kvthaw.engine.library import Library
from kvthaw.engine.lockstep import Lockstep
from kvthaw.engine.sampling import Sampling
from kvthaw.engine.scheduler import Scheduler
from kvthaw.errors import ConfigError, QueueFullError
from kvthaw.serve.errors import ApiError, too_long
from kvthaw.serve.jobs import Job
from kvthaw.serve.metrics import Metrics
from kvthaw.serve.schema import Body, Message, Sampled
from kvthaw.serve.watcher import Watcher
from kvthaw.serve.worker import Worker


class Service:
    """Serves one model under one name.

    batch: has no requests of its own. chat_template: Jinja; None for the tokenizer's. max_waiting: how many requests may wait for a
    place; more are told to come again. library: keeps prompts with a name on disk; those that it has are taken up. The other
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
    ) -> None:
        self.batch, self.tokenizer, self.name, self.created = batch, tokenizer, name, int(time.time())
        scheduler = Scheduler(batch)
        metrics = Metrics(scheduler, name)
        self.worker = Worker(
            scheduler,
            metrics,
            Watcher(batch, metrics.attention_mass.observe),
            batch.max_seqs + max_waiting,
            Lockstep(batch.cache.kv.settings.ranks),
        )
        self._grammars: Grammars | None = None
        self._compiling = asyncio.Lock()
        self._template = chat_template or tokenizer.chat_template
        self._library = library
        self._refreshing = asyncio.Lock()
        self.messages: dict[str, Sequence[Message]] = {}  # of the contexts that were given as such
        for kept, messages in () if library is None else library.restore().items():
            self._know(kept, messages)

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return not self.worker.draining and self.worker.failure is None

    @property
    def chats(self) -> bool:
        """Whether there is a chat template."""
        return self._template is not None

    def check(self, model: str | None, outputs: int) -> None:
        """Raise ApiError, before any work is done, for a model that is not served and for more outputs than there is room for."""
        if model not in (None, self.name):
            raise ApiError(404, f"the model {model!r} is not served; {self.name!r} is", param="model", code="model_not_found")
        if not self.ready:
            raise ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"})
        if outputs > self.worker.room:
            raise ApiError(
                400, f"the request wants {outputs} outputs; this server gives {self.worker.room} at a time", param="n"
            )
        try:
            self.worker.check_room(outputs)
        except QueueFullError as error:
            raise ApiError(429, str(error), code="rate_limit_exceeded", headers={"Retry-After": "1"}) from None

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a text; long ones keep nobody waiting."""
        return list(await asyncio.to_thread(self._encode, text, special))

    def kept(self) -> dict[str, Entry]:
        """Return the prompts that are kept under names; raises ApiError where none can be."""
        if self.batch.prefix_cache is None:
            raise ApiError(400, "this server keeps no prompts", param="context")
        return self.batch.prefix_cache.entries

    async def save(self, name: str, messages: Sequence[Message] | None = None) -> None:
        """Have a prompt that was kept under a name be there after a restart, where there is a folder for it."""
        self._know(name, messages)
        if self._library is not None and name in self.kept():
            parts = await self.worker.call(partial(self._library.parts, name))
            about = None if messages is None else [message.model_dump(exclude_none=True) for message in messages]
            await asyncio.to_thread(self._library.save, name, parts, about)

    async def forget(self, name: str) -> None:
        """Let a prompt that is kept under a name go."""
        self._know(name, None)
        self.worker.forget(name)
        if self._library is not None:
            await asyncio.to_thread(self._library.delete, name)

    async def refresh(self, name: str) -> None:
        """Take up a prompt that another server kept under a name in the same folder, or let go one that it deleted."""
        async with self._refreshing:
            if self._library is not None and self._library.changed(name):
                found = await self.worker.call(partial(self._library.refresh, name))
                self._know(name, found.get(name))

    async def context_tokens(self, body: Sampled) -> list[int]:
        """Return the tokens of the context that a request names, none without one; raises ApiError."""
        if body.context is None:
            return []
        await self.refresh(body.context)
        entry = self.kept().get(body.context)
        if entry is None or entry.salt != body.cache_salt:  # another tenant's is none
            raise ApiError(404, f"no context is named {body.context!r}", param="context", code="context_not_found")
        tokens: list[int] = entry.ids.tolist()
        return tokens

    async def context_messages(self, body: Sampled) -> Sequence[Message]:
        """Return the messages of the context that a request names, none without one; raises ApiError."""
        if await self.context_tokens(body) and body.context not in self.messages:
            raise ApiError(400, f"the context {body.context!r} is a text; a conversation follows messages", param="context")
        return self.messages[body.context] if body.context is not None else []

    async def encode_chat(self, messages: Sequence[Message], *, answer: bool = True, param: str = "messages") -> list[int]:
        """Return the tokens of a conversation, with answer up to where the answer begins; raises ApiError, which names param."""
        if self._template is None:
            raise ApiError(400, "the model has no chat template; start the server with --chat-template", param=param)
        turns = [message.plain() for message in messages]
        try:
            text = self.tokenizer.apply_chat_template(
                turns, chat_template=self._template, add_generation_prompt=answer, tokenize=False
            )
        except TemplateError as error:
            raise ApiError(400, f"the chat template refuses the messages: {error}", param=param) from None
        return await self.encode(text, special=False)

    async def grammar(self, body: Sampled) -> Grammar | None:
        """Return the grammar of the JSON that a request asks for, None for any text; raises ApiError. Compiles one at a time."""
        asked = body.json_format
        if asked is None:
            return None
        async with self._compiling:
            try:
                if self._grammars is None:
                    self._grammars = await asyncio.to_thread(Grammars, self.tokenizer, self.batch.vocabulary)
                if asked == "json_object":
                    return self._grammars.json()
                return await asyncio.to_thread(self._grammars.json_schema, asked.schema_, strict=asked.strict)
            except ConfigError as error:
                raise ApiError(400, f"{body.format_field}: {error}", param=body.format_field) from None

    def submit(self, body: Sampled, prompts: Sequence[Sequence[int]], sampling: Sampling, param: str, name: str) -> Job:
        """Let each prompt wait for its n outputs. param: the field that the prompts are of; name: the answer's. Raises ApiError."""
        limit = self.batch.capacity
        for ids in prompts:
            if len(ids) + (sampling.max_tokens or 1) > limit:
                raise too_long(len(ids), sampling.max_tokens or 1, limit, param)
        samplings = sampling.split(body.outputs)
        tensors = [torch.from_numpy(np.array(ids, dtype=np.int64)) for ids in prompts]  # numpy reads lists faster than torch
        try:
            requests = [
                self.batch.request(ids, sampling=one, tokenizer=self.tokenizer, cache_salt=body.cache_salt)
                for ids in tensors
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

    def _know(self, name: str, messages: Sequence[Any] | None) -> None:
        """Remember the messages of a context, None for one that is a text or is kept no more."""
        self.messages.pop(name, None)
        if messages is not None:
            self.messages[name] = [Message.model_validate(each) for each in messages]

    def _encode(self, text: str, special: bool) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return ids


def refused(body: Body, error: ConfigError, param: str) -> ApiError:
    """Return what a client is told of a setting that the engine refuses, by the first field that the message names."""
    words = [param if word == "prompt" else word for word in re.findall(r"\w+", str(error))]
    return ApiError(400, str(error), param=next((word for word in words if word in type(body).model_fields), None))
