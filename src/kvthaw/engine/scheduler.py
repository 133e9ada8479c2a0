"""Decide what each step of a running batch does: whom it decodes, whose prompt goes on, who waits."""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Callable, Sequence
from typing import Unpack

import torch
from torch import Tensor

from kvthaw.engine.batch import POLL, Batch
from kvthaw.engine.hf.model import attention_depth
from kvthaw.engine.request import Request, RequestOptions
from kvthaw.errors import CacheError, HostMemoryError, QueueFullError, at_least
from kvthaw.typecheck import check_type

_log = logging.getLogger(__name__)
MEMORY_ERRORS = (HostMemoryError, torch.OutOfMemoryError)
STEP_TOKENS = 4096
"""Tokens that one step processes on a GPU while other requests decode."""
CPU_WORK = 1 << 38
"""Multiplications that a CPU does in about a second: cores of a server do more, a laptop's fewer."""
CPU_SHARE, CPU_LEAST = 4, 32
"""How many times fewer tokens a chunk has on a CPU while other requests decode, and the fewest tokens of one. In chunks of 32 a
token takes no longer than in chunks of 512."""
DEPTH = 32768
"""Earlier tokens to which attention takes about as long as all else that a token takes, for an 8B model on an H200: 0.89 ns for
each of them, and 29 us."""
STREAMED = 2048
"""The fewest tokens of a chunk for which the KV before it comes over the bus."""
BUS = 2800
"""Tokens whose attention to an earlier one takes as long as the bus that brings its KV, of an 8B model on an H200: .79 ns each, and
131 kB in all layers at 52.6 GB/s, which are 3,150; less a tenth, since a step has more to do."""
_FEW = 512
"""Longer chunks are multiples of this, powers of two or 3/2 of one, for attention has plans for few lengths, see
kvthaw.kernels.dense. Others would take as long as the next multiple: the tiles of this many queries of 32 heads, 128 of each, are
as many as a GPU of 132 multiprocessors computes at once."""


class Scheduler:
    """Serves more requests than a batch has places for, and lets no long prompt silence the others.

    Each step gives every request whose prompt is whole one token, and one waiting prompt a chunk of what the budget of tokens
    leaves (chunked prefill; Sarathi-Serve, vLLM). Prompts that fit whole into the rest of the budget come in the same step. The
    deeper in the prompt a chunk is the fewer tokens it has, so that steps take about as long each; where earlier KV does not
    lie on the GPU, it has as many at least as hide the bus. While nobody decodes it has the batch's `prefill_chunk` tokens on a
    GPU. A CPU takes seconds for these, in which a short request that comes would wait; there it has 128 to 512, for a model of
    many weights few, and a quarter of that while others decode.

    - Requests get places by priority, the lowest number first, then in the order in which they came, once host and device
      memory suffice for all that they may need beside those that have places.
    - Where no place is free, a request takes that of the last one of a higher number that decodes, which goes on later.
    - Where host or device memory is short all the same, the request that comes last in this order gives its place back, and goes on
      once another has ended.
    - What a request that gives its place back (preemption) holds moves to host memory and back, without the model. Where host
      memory is what is short, and where its prompt is not whole, its prompt and its tokens go through the model again.
    - Where full attention ends (method="auto") and device_memory has no room for the index of as many sequences as there are
      places, there are fewer until all have ended; requests that lose theirs go through the model again.
    - Of the prompts that have places the one that came first and the one that is shortest take turns.
    - Where a model is split over processes every process makes the same calls (see `kvthaw.engine.lockstep`). Only what all of
      them notice alike, a lack of host memory, is helped there; other errors come up, since the others may be in mid-step.

    batch: has no requests of its own. step_tokens: about the tokens of a step, at the beginning of a prompt; None: 4,096 on a GPU,
    on a CPU 64 to 128. max_waiting: how many requests may wait for a place; None: any number.

    preemptions: how often a request gave its place back; resumed: how often one went on with what it had held; recomputed: how
    often one that had been preempted began again.

    Example::

        scheduler = kvthaw.Scheduler(kvthaw.Batch(model, "pariskv-plus", max_seqs=8, capacity=32768, budget=512))
        for prompt in prompts:
            scheduler.submit(prompt, max_new_tokens=200)
        while scheduler.busy:
            for request in scheduler.step():
                print(request.tokens[-1:], request.finished)
    """

    def __init__(self, batch: Batch, *, step_tokens: int | None = None, max_waiting: int | None = None) -> None:
        check_type(int | None, step_tokens=step_tokens, max_waiting=max_waiting)
        at_least(1, step_tokens=step_tokens)
        at_least(0, max_waiting=max_waiting)
        if batch.requests:
            raise CacheError(f"the batch has {len(batch.requests)} requests of its own; a scheduler takes one that has none")
        self.batch, self.max_waiting = batch, max_waiting
        self._alone = cpu_tokens(batch.model.num_parameters()) if batch.model.device.type == "cpu" else None
        self.step_tokens = step_tokens or (STEP_TOKENS if self._alone is None else max(64, self._alone // CPU_SHARE))
        self.split = batch.cache.kv.settings.ranks.size > 1
        own = self._alone is not None and step_tokens is None and not self.split  # parts may differ in their weights
        self._depth = attention_depth(batch.model) if own else None  # of this model, by which its chunks are made
        self.preemptions = self.resumed = self.recomputed = 0
        self._rank: dict[Request, tuple[int, int]] = {}  # of those that have not ended: priority, number of arrival
        self._waiting: list[Request] = []
        self._arrived = 0
        self._short = batch.max_seqs  # no more places are given while so many are taken
        self._shortest = False  # whether the shortest prompt has the next turn

    @property
    def waiting(self) -> list[Request]:
        """Requests without a place, in the order in which they will get one."""
        return list(self._waiting)

    @property
    def prefilling(self) -> list[Request]:
        """Requests that have a place and do not decode yet, in the order of their places: their prompts have not come wholly, or
        indexes are still being built."""
        return sorted(self.batch.prefilling, key=self._rank.__getitem__)

    @property
    def decoding(self) -> list[Request]:
        """Requests that get a token in every step."""
        return self.batch.decoding

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._waiting or self.batch.requests)

    def submit(self, prompt: Tensor | Sequence[int] | Request, *, priority: int = 0, **how: Unpack[RequestOptions]) -> Request:
        """Let a request wait for a place, and return it at once. prompt, how: as for `Batch.join`; priority: lower comes first.

        Raises ConfigError for a request that cannot be served, HostMemoryError for one that host_bytes can never hold and
        QueueFullError where max_waiting requests wait already."""
        check_type(int, priority=priority)
        if (
            self.max_waiting is not None
            and len(self._waiting) >= self.max_waiting
            and not (self.batch.free and not self._waiting)
        ):
            raise QueueFullError(f"{len(self._waiting)} requests wait; max_waiting is {self.max_waiting}")
        request = self.batch.request(prompt, **how)
        need, lacks = self.batch.admission.need(request), self.batch.admission.lacks(request)
        if lacks:
            raise HostMemoryError(
                f"the request may need {need:,} bytes for its KV; host_bytes and device_memory leave {need - lacks:,} for it"
            )
        self._rank[request] = priority, self._arrived
        self._arrived += 1
        self._wait(request)
        return request

    def cancel(self, request: Request) -> None:
        """Take a request out, wherever it is; its place is free at once. Raises CacheError for one that has finished or is not of
        this scheduler."""
        if request in self._waiting:
            self._waiting.remove(request)
            request.finished = "left"
            request.drop_swapped()
        else:
            self.batch.leave(request)
        del self._rank[request]

    def step(self) -> list[Request]:
        """Take one step. Returns the requests that got a token or ended, those whose prefill failed with finished="error" and the
        exception in `error`.

        What a decode step raises comes up, but for a lack of memory, and the next call takes it again."""
        self._make_way()
        give, told = self._launch(), list[Request]()
        try:
            self._place()  # what the host does from here on it does while the device decodes
            request = self._next_prompt()
            told += self.batch.start(POLL if request is None and not self.batch.decoding else 0.0)
            left, decoded = float(self.step_tokens), len(self.batch.decoding)
            while request is not None:
                depth = request.prefilled
                told += self._prefill(request, decoded)
                left -= (request.prefilled - depth) * (1 + depth / DEPTH)
                request = self._fitting(left) if request.prefilled == request.prompt else None
        finally:
            told = give() + told
            for request in told:
                if request.finished:
                    del self._rank[request]
        return told

    def _chunk(self, request: Request, decoded: int) -> int | None:
        """Return how many tokens of a prompt go through the model beside so many that were decoded; None: the batch's chunk."""
        if self._alone is not None and self._depth is not None:
            tokens = self.step_tokens if decoded else self._alone
            return max(CPU_LEAST, int(tokens / (1 + request.prefilled / self._depth)))
        if not decoded:
            return None if self._alone is None else chunk_tokens(self._alone, request.prefilled)
        tokens, left = chunk_tokens(self.step_tokens, request.prefilled, decoded), request.prompt - request.prefilled
        if self.batch.streams_back(request):
            return max(tokens, streamed_tokens(request.prefilled))
        deep = request.prefilled > DEPTH and _FEW < left < tokens  # attention without a plan takes 1.5 times as long
        return 1 << (left.bit_length() - 1) if deep else tokens

    def _prefill(self, request: Request, decoded: int) -> list[Request]:
        """Bring a prompt on, beside so many tokens that are decoded. Returns the request if it got a token or failed."""
        self._give_way(request)
        if request.seq < 0:
            return []
        try:
            return [request] if self.batch.prefill(request, self._chunk(request, decoded)) else []
        except Exception as error:
            if self.split and not isinstance(error, HostMemoryError):
                del self._rank[request]  # it has no place any longer, and nobody is told
                raise
            if isinstance(error, MEMORY_ERRORS) and (self.batch.requests or self._drop_swapped(error)):
                self._wait_again(request)
                return []
            request.fail(error)
            return [request]

    def _give_way(self, coming: Request | None = None) -> None:
        """Let those wait that lose their places where the method follows full attention; see Batch.give_way."""
        for request in self.batch.give_way(coming):
            self._preempted(request)

    def _launch(self) -> Callable[[], list[Request]]:
        self._give_way()
        try:
            return self.batch.launch()
        except MEMORY_ERRORS as error:
            if self.split and not isinstance(error, HostMemoryError):
                raise
            if self._drop_swapped(error):
                return list
            last = max(self.batch.requests, key=self._rank.__getitem__)
            self.batch.preempt(last, keep=not isinstance(error, HostMemoryError) and not self.split)
            if self.batch.requests:
                self._wait_again(last)
                return list
            last.fail(error)
            return lambda: [last]

    def _place(self) -> None:
        """Give places to those that wait, in their order, as long as there are places and memory."""
        if len(self.batch.requests) >= self._short:
            return
        self._short = self.batch.max_seqs
        while self._waiting and self.batch.free:
            request = self._waiting[0]
            if not self.batch.admission.fits(request, self.batch.requests, self._waiting):
                return
            preempted = request.swapped is not None
            try:
                self.batch.join(request)
            except Exception as error:
                if self.split or not self.batch.requests:
                    raise
                _log.warning("a request waits until another has ended: %s", error)
                self._short = len(self.batch.requests)
                return  # the others are told of the step's tokens
            del self._waiting[0]
            self.resumed += preempted and request in self.batch.decoding
            self.recomputed += preempted and request not in self.batch.decoding

    def _make_way(self) -> None:
        """Have the last of those that decode give its place back if one of a lower number waits for it."""
        repeats = self.batch.cache.kv.sequences.step is not None  # a step that failed, with all who took part
        if not self._waiting or self.batch.free or self.split or repeats or not self.batch.decoding:
            return
        first, last = self._waiting[0], max(self.batch.decoding, key=self._rank.__getitem__)
        fits = self._rank[first][0] < self._rank[last][0] and self.batch.admission.fits(
            first, self.batch.requests, self._waiting
        )
        if fits:
            self.batch.preempt(last)
            self._preempted(last)

    def _drop_swapped(self, error: Exception) -> bool:
        """Where host memory is short, let the last of those begin again that wait with what they hold there. Returns whether there
        was one."""
        away = [one for one in self.waiting if one.swapped is not None]
        if not away or not isinstance(error, HostMemoryError):
            return False
        away[-1].rewind()
        self.recomputed += 1
        return True

    def _next_prompt(self) -> Request | None:
        """The prompt that goes on: the one that came first and the one with the fewest tokens left, by turns."""
        prompts = [one for one in self.prefilling if one.prefilled < one.prompt]
        if not prompts:
            return None
        shortest, self._shortest = self._shortest, not self._shortest
        return min(prompts, key=lambda one: one.prompt - one.prefilled) if shortest else prompts[0]

    def _fitting(self, tokens: float) -> Request | None:
        """Return the first prompt whose rest takes no longer than this many tokens at the beginning of a prompt."""
        for one in self.prefilling:
            if 0 < (one.prompt - one.prefilled) * (1 + one.prefilled / DEPTH) <= tokens:
                return one
        return None

    def _wait(self, request: Request) -> None:
        insort(self._waiting, request, key=self._rank.__getitem__)

    def _preempted(self, request: Request) -> None:
        self.preemptions += 1
        self.recomputed += request.swapped is None
        self._wait(request)

    def _wait_again(self, request: Request) -> None:
        """Let a request that lost its place to a lack of memory wait until another one has ended."""
        self._preempted(request)
        self._short = max(1, len(self.batch.requests))


def cpu_tokens(weights: int) -> int:
    """Return how many tokens a CPU takes through so many weights in about a second, a power of two; more where reading the weights
    would take longer than the products, fewer where that saves little."""
    return min(512, max(128, 1 << (max(1, CPU_WORK // weights).bit_length() - 1)))


def chunk_tokens(step_tokens: int, depth: int, decoded: int = 0) -> int:
    """Return how many tokens behind `depth` earlier ones take about as long as `step_tokens` at the beginning of a prompt, or less;
    where they are few, without so many that are decoded."""
    if step_tokens <= _FEW:
        return max(1, round((step_tokens - decoded) / (1 + depth / DEPTH)))
    left = max(_FEW, int(step_tokens / (1 + depth / DEPTH)))
    return left - left % max(_FEW, 1 << (left.bit_length() - 2))


def streamed_tokens(depth: int) -> int:
    """Return how many tokens behind `depth` earlier ones take about as long as the bus that brings the KV of these."""
    return max(STREAMED, round(BUS * depth / (depth + DEPTH) / _FEW) * _FEW)
