"""Work in which clients take turns: threads, where short work never waits for long work, and a share of the interpreter."""

from __future__ import annotations

import _thread
import asyncio
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from kvthaw.engine.text import tokens_after
from kvthaw.serve.errors import ApiError

Result = TypeVar("Result")
NICE = 10
"""How much the system lowers the priority of threads that do long work."""


class Lane:
    """Run work in at most `threads` threads at a time, and a client's work one after the other.

    Work that has begun continues without its caller, and occupies its thread. No thread keeps the process from ending.

    nice: the threads' nice value, if the system has one for each thread (Linux).
    """

    def __init__(self, threads: int, nice: int = 0) -> None:
        self._places, self._nice = asyncio.Semaphore(threads), nice
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def run(self, work: Callable[[], Result], client: str) -> Result:
        """Return what work returns, in a thread, when it is the client's turn."""
        turn = self._turns.setdefault(client, asyncio.Lock())
        await turn.acquire()
        try:
            await self._places.acquire()
        except BaseException:
            turn.release()
            raise
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Result] = loop.create_future()

        def end(result: Any, error: BaseException | None) -> None:
            self._places.release()
            turn.release()
            if done.cancelled():
                return
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)

        def run() -> None:
            result = error = None
            try:
                if self._nice and sys.platform == "linux":
                    thread = threading.get_native_id()
                    os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + self._nice)
                result = work()
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(end, result, error)

        try:
            _thread.start_new_thread(run, ())  # Thread.start() would wait until it runs, and all clients with it
        except RuntimeError as error:  # the system has no thread left
            end(None, error)
        return await done


class FullError(Exception):
    """Too many wait."""


class Share:
    """Limits work that keeps the interpreter from all else: one piece runs at a time, and all in at most `part` of the time.

    most: how many pieces may wait or run.
    """

    def __init__(self, part: float, most: int) -> None:
        self._rest, self._most, self._here = 1 / part - 1, most, 0
        self._one = asyncio.Lock()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @property
    def full(self) -> bool:
        """Whether no other piece may wait."""
        return self._here >= self._most

    @asynccontextmanager
    async def turn(self, client: str, spent: float = 0.0) -> AsyncIterator[None]:
        """Wait for the client's turn. Others then wait until the rest of the process has had its part of the time. Raises
        FullError.

        spent: seconds that the piece had before.
        """
        if self.full:
            raise FullError
        self._here += 1
        try:
            async with self._turns.setdefault(client, asyncio.Lock()):
                await self._one.acquire()
                began = time.perf_counter()
                try:
                    yield
                finally:
                    rest = self._rest * (time.perf_counter() - began + spent)
                    asyncio.get_running_loop().call_later(rest, self._one.release)
        finally:
            self._here -= 1


THREADS = 2
"""Threads for short texts, and for long ones."""
SHORT = 1 << 16
"""Characters of a text that counts as short."""
_LONG_TOKEN = 8  # characters of a token; texts that would need longer ones are counted before
_CUT = 1024  # tokens by which a part of a text may have more than as a text


class Reader:
    """Tokenizes texts of at most `limit` tokens."""

    def __init__(self, tokenizer: Any, limit: int) -> None:
        self._tokenizer, self._limit = tokenizer, limit
        self._short, self._long = Lane(THREADS), Lane(THREADS, NICE)

    async def run(self, work: Callable[[], Result], size: int, client: str) -> Result:
        """Run work on `size` characters in a thread and return its result. Clients take turns; short texts do not wait for
        long ones."""
        lane = self._short if size <= SHORT else self._long
        return await lane.run(work, client)

    def tokens(self, text: str, behind: Sequence[int] = (), *, param: str, special: bool = False) -> list[int]:
        """Return the tokens of a text.

        behind: tokens that precede the text, see `tokens_after`.

        Raises ApiError, with param, for a text with too many tokens. That takes about the time of tokenizing the limit.
        """
        if len(text) > _LONG_TOKEN * max(self._limit, _CUT):
            self._count(text, param)
        return tokens_after(self._tokenizer, text) if behind else self._encode(text, special)

    def _count(self, text: str, param: str) -> None:
        """Raise ApiError if a text certainly has too many tokens. Count tokens of its parts. A tokenizer may drop characters
        or merge any number into one unknown token, so that the length alone proves nothing."""
        found, part = 0, min(SHORT, _LONG_TOKEN * max(self._limit, _CUT))
        for start in range(0, len(text), part):
            found += max(0, len(self._encode(text[start : start + part], special=False)) - _CUT)
            if found > self._limit:
                says = f"the prompt has more than {found} tokens; the context length of this server is {self._limit} tokens"
                raise ApiError(400, says, param=param, code="context_length_exceeded")

    def _encode(self, text: str, special: bool) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return ids
