"""Named prompts that the server keeps, in memory and in a folder. Some are prefilled while no client waits for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from kvthaw.cache.prefix import PrefixCache
from kvthaw.cache.prefix_kept import Entry, Key
from kvthaw.engine.library import Library
from kvthaw.engine.lockstep import Forget
from kvthaw.engine.request import hidden_salt
from kvthaw.errors import hint
from kvthaw.serve.errors import ApiError, as_api_error
from kvthaw.serve.jobs import Job
from kvthaw.serve.schema import Message
from kvthaw.serve.turns import document_of
from kvthaw.serve.worker import Worker

_log = logging.getLogger(__name__)
_FAILURES = 256  # that are listed


class Documents:
    """Keep named prompts, and restore the prompts of a folder. Only the event loop's thread uses it.

    prefix: keeps prompts in memory; None: the server keeps none.
    library: keeps them on disk.
    background: starts work that continues if its future is cancelled.
    coming: jobs that keep a prompt, by its key, with the error of failed ones. A job leaves once its key's prompt is kept or
        deleted.
    writing: keys whose files are being written or deleted.
    """

    def __init__(
        self,
        prefix: PrefixCache | None,
        library: Library | None,
        worker: Worker,
        background: Callable[[Coroutine[Any, Any, Any]], asyncio.Future[Any]],
    ) -> None:
        self._prefix, self._library, self._worker, self._background = prefix, library, worker, background
        self.coming: dict[Key, tuple[Job, ApiError | None]] = {}
        self.writing: set[Key] = set()
        self._locks: WeakValueDictionary[Key, asyncio.Lock] = WeakValueDictionary()  # one reads, writes or deletes at a time
        if library is not None:
            library.restore(_about)

    def kept(self, salt: str = "") -> dict[str, Entry]:
        """Return the named prompts of a salt. Raises ApiError if the server keeps no prompts."""
        if self._prefix is None:
            raise ApiError(400, "this server keeps no prompts", param="context")
        return {name: entry for (own, name), entry in self._prefix.entries.items() if own == salt}

    async def named(self, name: str | None, cache_salt: str) -> Entry | None:
        """Return the context that a request names, None without one; raises ApiError."""
        if name is None:
            return None
        key = hidden_salt(cache_salt), name  # another tenant's is none
        await self.refresh(key)
        return self.entry(key, "context")

    def entry(self, key: Key, param: str) -> Entry:
        """Return a named prompt. Raises ApiError, with param, if there is none."""
        kept = self.kept(key[0])
        if key[1] not in kept:
            near = hint(key[1], kept)
            said = f"no context is named {key[1]!r}" + (f"; {near}" if near else "")
            raise ApiError(404, said, param=param, code="context_not_found")
        return kept[key[1]]

    def expect(self, key: Key, job: Job, kept: Coroutine[Any, Any, object]) -> None:
        """List a job as coming until its prompt is `kept`."""
        self.coming.pop(key, None)
        self.coming[key] = job, None
        self._background(self._end(key, job, kept))

    def cancel(self, key: Key) -> None:
        """Cancel the job that would keep a prompt, if there is one."""
        job, _ = self.coming.pop(key, (None, None))
        if job is not None:
            self._worker.cancel(job)

    def save(self, job: Job) -> asyncio.Future[str | None]:
        """Save a job's named prompt to the folder, if any, so that it survives a restart. The save continues if the caller is
        cancelled. Returns an error message for the client if a file cannot be written."""
        named = next((one.spec for one in job.requests if one.spec.name is not None), None)
        if self._library is not None and named is not None and not job.cut_short:
            return self._background(self._save(self._library, (named.salt, named.name or "")))
        nothing: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        nothing.set_result(None)
        return nothing

    async def forget(self, key: Key) -> None:
        """Delete a named prompt. Raises ApiError, and changes nothing, if its files cannot be deleted."""
        if (error := await self._background(self._forget(key))) is not None:
            says = f"the context {key[1]!r} is kept: its files cannot be deleted: {error.strerror or error}"
            raise ApiError(500, says, param="name", code="context_not_deleted")

    async def refresh(self, key: Key) -> None:
        """Load a named prompt that another server saved in the same folder, or drop one that it deleted."""
        library = self._library
        if library is not None and key not in self.writing:
            async with self._lock(key):
                if library.changed(key):
                    await self._worker.call(partial(library.refresh, key, _about))

    def has_files(self, key: Key) -> bool:
        """Return whether there are files of a prompt, be they damaged."""
        return self._library is not None and self._library.holds(key)

    def _lock(self, key: Key) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())

    @asynccontextmanager
    async def _changing(self, key: Key) -> AsyncIterator[None]:
        """Exclude all others from writing or deleting the files of a name. Requests for the prompt get the one in memory
        meanwhile."""
        async with self._lock(key):
            self.writing.add(key)
            try:
                yield
            finally:
                self.writing.discard(key)

    async def _save(self, library: Library, key: Key) -> str | None:
        """Write the prompt that is in memory under a name, in turn. A deleted prompt is not written; of several, the last is.
        Returns an error message if a file cannot be written."""
        async with self._changing(key):
            try:
                write = await self._worker.call(partial(library.collect, key)) if self._worker.failure is None else None
                if write is not None:
                    await asyncio.to_thread(write)
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
            prefix, (salt, name) = self._prefix, key
            if prefix is not None:
                await self._worker.call(
                    lambda: prefix.forget(name, salt) if key in prefix.entries else None, [Forget(salt, name)]
                )
            return None

    async def _end(self, key: Key, job: Job, kept: Coroutine[Any, Any, object]) -> None:
        failure = None
        try:
            await kept
        except Exception as error:
            failure = as_api_error(error)
            if failure.status >= 500:
                _log.error("the context %r was not kept", key[1], exc_info=error)
        if self.coming.get(key, (None, None))[0] is not job:
            return  # another one has its name, or it was deleted
        if failure is None:
            del self.coming[key]
            return
        self.coming[key] = job, failure
        failed = [one for one, (_, error) in self.coming.items() if error is not None]
        for one in failed[:-_FAILURES]:
            del self.coming[one]


def _about(about: Any) -> Any:
    """Check the saved description of a context: messages, a document, or None. Raises for any other value."""
    if document_of(about) is None:
        for each in () if about is None else about:
            Message.model_validate(each)
    return about
