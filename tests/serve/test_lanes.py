"""Work in threads: short work waits for no long work, clients take turns, and what was begun keeps its place."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvthaw.serve.lanes import Lane, Lanes


class Works:
    """Work that ends when it is told to."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ends: dict[str, threading.Event] = {}

    def __call__(self, name: str) -> Callable[[], str]:
        end = self.ends[name] = threading.Event()

        def work() -> str:
            self.begun.append(name)
            end.wait(10)
            return name

        return work

    async def settled(self, *begun: str) -> None:
        for _ in range(500):
            await asyncio.sleep(0.002)
            if len(self.begun) >= len(begun):
                break
        await asyncio.sleep(0.02)
        assert sorted(self.begun) == sorted(begun)


def run(main: Callable[[Works], Coroutine[Any, Any, None]]) -> None:
    works = Works()

    async def whole() -> None:
        try:
            await main(works)
        finally:
            for end in works.ends.values():
                end.set()
            await asyncio.sleep(0.02)

    asyncio.run(whole())


def test_a_client_has_one_thread_however_many_there_are() -> None:
    async def main(works: Works) -> None:
        lane = Lane(2)
        tasks = {name: asyncio.create_task(lane.run(works(name), name[0])) for name in ("a1", "a2", "a3", "b1", "c1")}
        await works.settled("a1", "b1")
        works.ends["b1"].set()
        assert await tasks["b1"] == "b1"
        await works.settled("a1", "b1", "c1")
        works.ends["a1"].set()
        await works.settled("a1", "b1", "c1", "a2")

    run(main)


def test_work_that_nobody_waits_for_keeps_its_place_and_none_is_begun_for_nobody() -> None:
    async def main(works: Works) -> None:
        lane = Lane(1)
        tasks = {name: asyncio.create_task(lane.run(works(name), name[0])) for name in ("a1", "a2", "b1")}
        await works.settled("a1")
        for name in ("a1", "a2"):
            tasks[name].cancel()
        await works.settled("a1")
        works.ends["a1"].set()
        await works.settled("a1", "b1")
        works.ends["b1"].set()
        assert await tasks["b1"] == "b1"

    run(main)


def test_short_work_waits_for_no_long_work() -> None:
    async def main(works: Works) -> None:
        lanes = Lanes(1, 1)
        tasks = [asyncio.create_task(lanes.long.run(works(f"{i}"), f"{i}")) for i in range(3)]
        assert await lanes.short.run(lambda: 5, "0") == 5
        for task in tasks:
            task.cancel()

    run(main)


def test_an_error_is_raised_where_the_result_is_awaited() -> None:
    async def main(works: Works) -> None:
        lane = Lane(1)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                await lane.run(lambda: 1 // 0, "a")

    run(main)
