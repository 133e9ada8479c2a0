"""Work in which clients take turns: threads, where short work never waits for long work, and a share of the interpreter."""

from __future__ import annotations

import _thread
import asyncio
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar
from weakref import WeakValueDictionary

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
