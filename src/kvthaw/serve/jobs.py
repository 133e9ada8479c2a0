"""What the event loop knows of the requests that the worker serves: a job for each HTTP request, and what steps added to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from kvthaw.engine.logprobs import TokenLogprobs
from kvthaw.engine.request import Request
from kvthaw.engine.tool_calls import CallPiece


@dataclass(eq=False, slots=True)
class Delta:
    """The tokens that one or more steps added to an output.

    finished: why the output ended; "abort" if the server ended it, "error" with the error.
    cached_tokens: cached tokens of the prompt, given with the first token.
    calls: parts of tool calls, which the text then lacks.
    """

    index: int
    tokens: Sequence[int] = ()
    text: str = ""
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs | None] = ()
    finished: str | None = None
    error: Exception | None = None
    cached_tokens: int = 0
    calls: Sequence[CallPiece] = ()


class Job:
    """The outputs of one HTTP request. Only the event loop's thread uses it.

    numbers: numbers of its requests among all requests.
    arrived, first: times of the request and of its first token, by time.perf_counter(); 0 before.
    aborted: whether the server ended an output.
    cut_short: whether it did so before the first token: the prompt is not whole.
    """

    def __init__(self, requests: Sequence[Request], numbers: Sequence[int]) -> None:
        self.requests, self.numbers, self.arrived = requests, numbers, time.perf_counter()
        self.first = 0.0
        self.aborted = self.cut_short = False
        self.open = set(range(len(requests)))
        self._deltas: list[Delta] = []  # unread
        self._changed = asyncio.Event()
        self._streamed = False

    def push(self, delta: Delta) -> None:
        """Add to an output that has not ended."""
        if delta.index in self.open:
            self._deltas.append(delta)
            if delta.tokens and not self.first:
                self.first = time.perf_counter()
            if delta.finished is not None:
                self.open.remove(delta.index)
                self.aborted |= delta.finished == "abort"
                self.cut_short |= self.aborted and not self.first
            if self._streamed or not self.open or delta.error is not None:
                self._changed.set()

    def close(self) -> None:
        """End all outputs."""
        self.open.clear()
        self._changed.set()

    async def stream(self, patience: float) -> AsyncIterator[list[Delta]]:
        """Yield new deltas, at most one per output and an error, until all outputs have ended. After `patience` seconds
        without any, yield an empty list."""
        self._streamed, loop = True, asyncio.get_running_loop()
        while self.open or self._deltas:
            if not self._deltas:
                timer = loop.call_later(patience, self._changed.set)
                await self._changed.wait()
                timer.cancel()
            self._changed.clear()
            new, self._deltas = self._deltas, []
            yield new if len(new) == 1 else _merged(new)

    async def whole(self) -> list[Delta]:
        """Return the outputs once all have ended, or one has failed: then its error is the last delta."""
        if self.open:
            await self._changed.wait()
        return _merged(self._deltas)


def _merged(deltas: Sequence[Delta]) -> list[Delta]:
    """Return one delta for each output that there are any of, by index, then errors."""
    parts: dict[int, list[Delta]] = {}
    for delta in deltas:
        if delta.error is None:
            parts.setdefault(delta.index, []).append(delta)
    return [_joined(parts[index]) for index in sorted(parts)] + [delta for delta in deltas if delta.error is not None]


def _joined(deltas: Sequence[Delta]) -> Delta:
    first = deltas[0]
    if len(deltas) == 1:
        return first
    return Delta(
        first.index,
        [token for delta in deltas for token in delta.tokens],
        "".join(delta.text for delta in deltas),
        [score for delta in deltas for score in delta.logprobs],
        first.prompt_logprobs,
        deltas[-1].finished,
        cached_tokens=first.cached_tokens,
    )
