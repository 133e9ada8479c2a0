"""Decide what each step of a running batch does: whom it decodes, whose prompt goes on, who waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kvthaw.engine.batch import Batch, Request
from kvthaw.engine.sampling import GREEDY, Sampling
from kvthaw.errors import CacheError, HostMemoryError, QueueFullError, at_least
from kvthaw.typecheck import check_type

STEP_TOKENS = 4096
"""Tokens that one step processes while other requests decode. A chunk of so many hides the bus that brings the KV before it."""


class Scheduler:
    """Serves more requests than a batch has places for, and lets no long prompt silence the others.

    Each step gives every request whose prompt is whole one token, and one waiting prompt a chunk of what the budget of tokens
    leaves (chunked prefill; Sarathi-Serve, vLLM). While nobody decodes a chunk has the batch's `prefill_chunk` tokens.

    - Requests get places by priority, the lowest number first, then in the order in which they came, once host memory suffices for
      all that they may need beside those that have places. So none fails later for lack of it.
    - Of the prompts that have places the one that came first and the one that is shortest take turns.
    - A method that evicts cannot take a prompt in chunks; its prompts go through the model whole.

    batch: has no requests of its own. step_tokens: tokens of a step. max_waiting: how many requests may wait for a place; None: any
    number.

    Example::

        scheduler = kvthaw.Scheduler(kvthaw.Batch(model, "pariskv-plus", max_seqs=8, capacity=32768, budget=512))
        for prompt in prompts:
            scheduler.submit(prompt, max_new_tokens=200)
        while scheduler.busy:
            for request in scheduler.step():
                print(request.tokens[-1:], request.finished)
    """

    def __init__(self, batch: Batch, *, step_tokens: int = STEP_TOKENS, max_waiting: int | None = None) -> None:
        check_type(int, step_tokens=step_tokens)
        check_type(int | None, max_waiting=max_waiting)
        at_least(1, step_tokens=step_tokens)
        at_least(0, max_waiting=max_waiting)
        if batch.added:
            raise CacheError(f"the batch has {len(batch.added)} requests of its own; a scheduler takes one that has none")
        self.batch, self.step_tokens, self.max_waiting = batch, step_tokens, max_waiting
        self._waiting: list[tuple[int, int, Request]] = []  # priority, number of arrival, request
        self._prefilling: list[Request] = []  # in the order of their arrival
        self._arrived = 0
        self._short = batch.max_seqs  # no more places are given while so many are taken
        self._shortest = False  # whether the shortest prompt has the next turn

    @property
    def waiting(self) -> list[Request]:
        """Requests without a place, in the order in which they will get one."""
        return [request for _, _, request in sorted(self._waiting, key=lambda each: each[:2])]

    @property
    def prefilling(self) -> list[Request]:
        """Requests that have a place and whose prompt has not come wholly."""
        return list(self._prefilling)

    @property
    def decoding(self) -> list[Request]:
        """Requests that get a token in every step."""
        return self.batch.requests

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._waiting or self.batch.added)

    def submit(
        self,
        prompt: Tensor | Sequence[int] | Request,
        *,
        max_new_tokens: int | None = None,
        stop: int | Sequence[int] | None = None,
        sampling: Sampling = GREEDY,
        tokenizer: Any = None,
        cache_salt: str = "",
        priority: int = 0,
    ) -> Request:
        """Let a request wait for a place, and return it at once. Arguments are those of `Batch.join`, or one request that
        `Batch.request` made of them, which another thread may do during a step; priority: lower comes first.

        Raises ConfigError for a request that cannot be served, HostMemoryError for one that host_bytes can never hold and
        QueueFullError where max_waiting requests wait already."""
        check_type(int, priority=priority)
        if (
            self.max_waiting is not None
            and len(self._waiting) >= self.max_waiting
            and not (self.batch.free and not self._waiting)
        ):
            raise QueueFullError(f"{len(self._waiting)} requests wait; max_waiting is {self.max_waiting}")
        request = (
            prompt
            if isinstance(prompt, Request)
            else self.batch.request(
                prompt, max_new_tokens=max_new_tokens, stop=stop, sampling=sampling, tokenizer=tokenizer, cache_salt=cache_salt
            )
        )
        need, limit = self.batch.host_bytes(request), self.batch.cache.settings.host_bytes
        if limit is not None and need > limit:
            raise HostMemoryError(f"the request may need {need:,} bytes of host memory; host_bytes is {limit:,}")
        self._waiting.append((priority, self._arrived, request))
        self._arrived += 1
        return request

    def cancel(self, request: Request) -> None:
        """Take a request out, wherever it is; its place is free at once. Raises CacheError for one that has finished or is not of
        this scheduler."""
        for i, (_, _, other) in enumerate(self._waiting):
            if other is request:
                del self._waiting[i]
                request.finished = "left"
                return
        self.batch.leave(request)
        self._forget(request)

    def step(self) -> list[Request]:
        """Take one step. Returns the requests that got a token or ended, those whose prefill failed with finished="error" and the
        exception in `error`.

        What a decode step raises comes up, and the next call takes it again."""
        self._place()
        told = self.batch.step()
        if self._prefilling:
            request = self._next_prompt()
            left = max(1, self.step_tokens - len(told)) if told else self.batch.prefill_chunk
            try:
                done = self.batch.prefill(request, left)
            except Exception as error:
                self._forget(request)
                done = not self._wait_again(request, error)
            if done:
                self._forget(request)
                told.append(request)
        return told

    def _place(self) -> None:
        """Give places to those that wait, in their order, as long as there are places and host memory."""
        if len(self.batch.added) >= self._short:
            return
        self._short = self.batch.max_seqs
        for request in self.waiting[: self.batch.free]:
            if not self._fits(request):
                return
            self._waiting = [each for each in self._waiting if each[2] is not request]
            self.batch.add(request)
            self._prefilling.append(request)

    def _fits(self, request: Request) -> bool:
        limit, kept = self.batch.cache.settings.host_bytes, self.batch.prefix_cache
        pinned = 0 if kept is None else kept.pinned_bytes
        return limit is None or pinned + sum(map(self.batch.host_bytes, [request, *self.batch.added])) <= limit

    def _next_prompt(self) -> Request:
        """The prompt that goes on: the one that came first and the one with the fewest tokens left, by turns."""
        shortest, self._shortest = self._shortest, not self._shortest
        return min(self._prefilling, key=lambda one: one.prompt - one.prefilled) if shortest else self._prefilling[0]

    def _wait_again(self, request: Request, error: Exception) -> bool:
        """Let a prompt for which the system had no memory wait until another request has ended; end any other with its error."""
        if isinstance(error, HostMemoryError) and self.batch.added:
            self._waiting.append((-(1 << 62), -self._arrived, request))
            self._short = len(self.batch.added)
            return True
        request.finished, request.error = "error", error
        return False

    def _forget(self, request: Request) -> None:
        self._prefilling = [other for other in self._prefilling if other is not request]
