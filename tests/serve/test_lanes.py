"""Work in threads: short work waits for no long work, clients take turns, and what was begun keeps its place."""

from __future__ import annotations

import _thread
import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvthaw.serve.lanes import NICE, FullError, Lane, Share


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
        for _ in range(5000):
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
        short, long = Lane(1), Lane(1, NICE)
        tasks = [asyncio.create_task(long.run(works(f"{i}"), f"{i}")) for i in range(3)]
        assert await short.run(lambda: 5, "0") == 5
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


def test_where_no_thread_can_be_started_the_place_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    async def main(works: Works) -> None:
        lane = Lane(1)
        with monkeypatch.context() as patch:
            patch.setattr("kvthaw.serve.lanes._thread.start_new_thread", refuse)
            for client in "ab":
                with pytest.raises(RuntimeError, match="can't start new thread"):
                    await asyncio.wait_for(lane.run(lambda: 5, client), 5)
        assert await asyncio.wait_for(lane.run(lambda: 5, "a"), 5) == 5

    run(main)


def test_the_event_loop_does_not_wait_until_a_thread_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it would while others hold the interpreter; no client is answered meanwhile."""
    start, late = _thread.start_new_thread, list[Callable[[], None]]()

    async def main(works: Works) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(_thread, "start_new_thread", lambda run, _: late.append(run))
            waits = asyncio.create_task(Lane(1).run(lambda: 5, "a"))
            for _ in range(10):
                await asyncio.sleep(0)
        assert len(late) == 1
        start(late[0], ())
        assert await waits == 5

    run(main)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities of their own")
def test_the_system_prefers_other_threads_to_long_work() -> None:
    async def main(works: Works) -> None:
        short, long = Lane(1), Lane(1, NICE)
        found = [await lane.run(lambda: os.getpriority(os.PRIO_PROCESS, 0), "a") for lane in (short, long)]
        assert found[1] - found[0] == min(NICE, 19 - found[0])
        assert os.getpriority(os.PRIO_PROCESS, 0) == found[0]

    run(main)


def test_a_share_runs_one_piece_at_a_time_in_a_part_of_the_time() -> None:
    async def main(works: Works) -> None:
        share, order = Share(0.25, 9), list[str]()

        async def work(name: str) -> None:
            async with share.turn(name[0]):
                order.append(name)
                time.sleep(0.02)

        began = time.monotonic()
        await asyncio.gather(*(work(name) for name in ("a1", "a2", "a3", "b1", "c1")))
        assert order == ["a1", "a2", "b1", "c1", "a3"], "clients take turns: a1 ended before others came"
        assert time.monotonic() - began > 4 * 0.08, "the last one's rest holds up nobody"

    run(main)


def test_a_share_counts_what_a_piece_has_had_before() -> None:
    """As a body that was received: else faster refusals would only let more of them come."""

    async def main(works: Works) -> None:
        share, begun = Share(0.25, 9), list[float]()
        for _ in range(2):
            async with share.turn("a", spent=0.02):
                begun.append(time.monotonic())
        assert begun[1] - begun[0] > 0.05

    run(main)


def test_a_share_has_room_for_so_many_and_what_leaves_or_fails_makes_room() -> None:
    async def main(works: Works) -> None:
        share = Share(0.5, 2)

        async def work(seconds: float) -> None:
            async with share.turn("a"):
                await asyncio.sleep(seconds)
                raise ZeroDivisionError

        tasks = [asyncio.create_task(work(seconds)) for seconds in (0.02, 5)]
        await asyncio.sleep(0)
        with pytest.raises(FullError):
            await work(0)
        tasks[1].cancel()
        for task, error in zip(tasks, (ZeroDivisionError, asyncio.CancelledError), strict=True):
            with pytest.raises(error):
                await task
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(work(0), 5)

    run(main)
