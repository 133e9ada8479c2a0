"""A job hands what steps add to its outputs to the handler that answers the request."""

from __future__ import annotations

import asyncio
from typing import Any

from kvthaw.serve.jobs import Delta, Job


def job(outputs: int) -> Job:
    requests: list[Any] = [object()] * outputs
    return Job(requests, range(outputs))


def test_a_late_reader_gets_one_delta_an_output() -> None:
    async def read() -> list[list[tuple[int, str, list[int], str | None]]]:
        one, found = job(2), []
        for delta in (Delta(1, [5], "a"), Delta(0, [6], "b"), Delta(1, [7], "c", finished="stop")):
            one.push(delta)
        async for deltas in one.stream(10):
            found.append([(each.index, each.text, list(each.tokens), each.finished) for each in deltas])
            if len(found) == 1:
                one.push(Delta(1, [8], "too late"))
                one.push(Delta(0, [9], "d", finished="length"))
        return found

    assert asyncio.run(read()) == [[(0, "b", [6], None), (1, "ac", [5, 7], "stop")], [(0, "d", [9], "length")]]


def test_a_stream_yields_nothing_where_nothing_comes_and_ends_where_the_job_is_closed() -> None:
    async def read() -> list[int]:
        one, found = job(1), []
        one.push(Delta(0, [5], "a"))
        async for deltas in one.stream(0.01):
            found.append(len(deltas))
            if len(found) == 3:
                one.close()
        return found

    assert asyncio.run(read()) == [1, 0, 0]


def test_an_error_comes_last_and_alone_and_ends_a_whole_answer_at_once() -> None:
    async def read() -> list[Delta]:
        one = job(2)
        waits = asyncio.create_task(one.whole())
        one.push(Delta(1, [5], "a"))
        await asyncio.sleep(0)
        one.push(Delta(0, finished="error", error=ValueError("no")))
        return await asyncio.wait_for(waits, 1)

    text, error = asyncio.run(read())
    assert (text.index, text.text, text.error, error.index) == (1, "a", None, 0)
    assert isinstance(error.error, ValueError)
