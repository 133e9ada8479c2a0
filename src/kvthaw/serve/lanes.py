"""Threads in which short work never waits for long work, and in which clients take turns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakValueDictionary

Result = TypeVar("Result")


class Lane:
    """Runs work in at most so many threads at a time, and of one client one after the other.

    Work that has begun goes on where nobody waits for it any longer, and keeps its place. No thread keeps the process from ending.
    """

    def __init__(self, threads: int) -> None:
        self._places = asyncio.Semaphore(threads)
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
                result = work()
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(end, result, error)

        threading.Thread(target=run, name="kvthaw-lane", daemon=True).start()
        return await done


class Lanes:
    """A lane for short work and one for long work."""

    def __init__(self, short: int, long: int) -> None:
        self.short, self.long = Lane(short), Lane(long)
