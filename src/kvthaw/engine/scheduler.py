"""Schedule the steps of a running batch: which requests decode, which prompt is prefilled, and which requests wait."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Unpack

import torch
from torch import Tensor

from kvthaw.engine.batch import POLL, Batch
from kvthaw.engine.chunk_lengths import ChunkLengths, work
from kvthaw.engine.fair_share import FairQueue
from kvthaw.engine.prompt_turns import OUTPUT, PromptTurns
from kvthaw.engine.request import Request, RequestOptions
from kvthaw.errors import CacheError, HostMemoryError, QueueFullError, at_least
from kvthaw.formatting import counted
from kvthaw.typecheck import check_type

_log = logging.getLogger(__name__)
MEMORY_ERRORS = (HostMemoryError, torch.OutOfMemoryError)


class Scheduler:
    """Serve more requests than a batch has slots, without letting a long prompt block the others.

    Each step decodes one token of every request with a complete prompt. The rest of its token budget prefills a chunk of
    one prompt (chunked prefill; Sarathi-Serve, vLLM). Further prompts that fit whole into the budget are prefilled in the
    same step.

    The deeper in the prompt a chunk is, the shorter it is, so that steps take similar time. If earlier KV is not on the
    GPU, a chunk is long enough to hide the bus. If no request decodes, a chunk has the batch's `prefill_chunk` tokens on a
    GPU. On a CPU that would take seconds, and a short request that arrives would wait. A CPU therefore takes 128 to 512
    tokens, fewer for larger models, and 64 while others decode.

    - Requests get slots by priority, the lowest number first, once host and device memory suffice for them and the running
      requests. Within a number the client with the least service is next (see `FairShare`), and within a client the earliest
      request.
    - The prompts of the client with the least service are prefilled first, too. While a client with less service decodes, the
      chunks of others are smaller, so that it waits less for its tokens. On a CPU the smallest chunk takes longer than a decode
      step. There one comes every four steps times the number of such clients. It comes earlier if it is no more service than
      what each of them had since the last one.
    - If no slot is free, a request preempts the last request of a higher number that can continue later. So does a request of
      a client without a slot that has had less service. The client with the most slots then loses one of several, or its only
      one if it has had more service by a margin.
    - If memory still runs short, the last request in this order is preempted, and continues once another has ended.
    - The state of a preempted request is swapped to host memory and back. An incomplete prompt continues from the prefix cache.
      If there is none or host memory is short, prompt and tokens are prefilled again.
    - When full attention ends (method="auto"), device_memory may not hold the index of all slots. There are then fewer
      slots until all requests have ended. Requests that lose theirs are prefilled again.
    - Of a client's prompts in slots, the earliest and the shortest take turns.
    - While one of them is long, the last slot is for a short prompt; a second long one would only wait there.
    - If a model is split over processes, every process makes the same calls (see `kvthaw.engine.lockstep`). Only a lack of
      host memory, which all processes notice, is handled there. Other errors are raised, since other processes may be
      inside a step.

    batch: without requests of its own.
    step_tokens: about the tokens of a step, at the start of a prompt; None: 4,096 on a GPU, 64 on a CPU.
    max_waiting: how many requests may wait for a slot; None: unlimited.
    preemptions: number of preemptions so far.
    resumed: how many requests were swapped in again.
    recomputed: how many preempted requests were prefilled again.
    ahead: whether a step may be launched before the tokens of the step before are read.

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
            raise CacheError(
                f"the batch has {counted(len(batch.requests), 'request')} of its own; a scheduler takes one that has none"
            )
        self.batch, self.max_waiting = batch, max_waiting
        lengths = ChunkLengths(batch, step_tokens)
        self.step_tokens = lengths.step
        self.split = batch.cache.kv.settings.ranks.size > 1
        self.preemptions = self.resumed = self.recomputed = 0
        self._queue = FairQueue(credit=2 * self.step_tokens)
        self._share = self._queue.share
        self._turns = PromptTurns(batch, self._queue, lengths)
        self.ahead = batch.model.device.type == "cuda" and not self.split
        self._untold: list[Request] = []  # requests whose tokens were read by a step that then failed
        self._short = batch.max_seqs  # no more slots are given while this number is taken

    @property
    def waiting(self) -> list[Request]:
        """Requests without a slot, by priority, then by arrival."""
        return list(self._queue.waiting)

    @property
    def prefilling(self) -> list[Request]:
        """Requests that have a slot but do not decode yet, in scheduling order: their prompt or index is incomplete."""
        return self._turns.prefilling

    @property
    def decoding(self) -> list[Request]:
        """Requests that get a token in every step."""
        return self.batch.decoding

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._queue.waiting or self.batch.requests or self.batch.unread or self._untold)

    def submit(self, prompt: Tensor | Sequence[int] | Request, *, priority: int = 0, **how: Unpack[RequestOptions]) -> Request:
        """Queue a request for a slot, and return it at once.

        Raises ConfigError for a request that cannot be served, HostMemoryError for one that host_bytes can never hold, and
        QueueFullError if max_waiting requests wait already.

        prompt, how: as for `Batch.join`.
        priority: lower comes first.
        """
        check_type(int, priority=priority)
        waiting = len(self._queue.waiting)
        if self.max_waiting is not None and waiting >= self.max_waiting and (waiting or not self.batch.free):
            raise QueueFullError(f"{counted(waiting, 'request')} in the queue; max_waiting is {self.max_waiting}")
        request = self.batch.request(prompt, **how)
        need, lacks = self.batch.admission.need(request), self.batch.admission.lacks(request)
        if lacks:
            raise HostMemoryError(
                f"the request may need {need:,} bytes for its KV; host_bytes and device_memory leave {need - lacks:,} for it"
            )
        self._queue.submit(request, priority)
        return request

    def cancel(self, request: Request) -> None:
        """Remove a request, queued or running. Its slot is free at once. Raises CacheError if it has finished or is unknown."""
        if request not in self._queue:
            raise CacheError("the request is not in the batch or the queue")
        if request in self._queue.waiting:
            self._queue.waiting.remove(request)
            request.finished = "left"
            request.drop_swapped()
        elif request.finished is None:  # else it has ended, and no step has returned it yet
            self.batch.leave(request)
        self._queue.forget(request)

    def step(self) -> list[Request]:
        """Take one step. Returns the requests that got a token or ended.

        On a GPU these are the tokens of the step before: the host reads them once the next step is launched, so that the
        device does not wait for it. With a grammar, which must see each token before the next step, or with a host index, a
        step returns its own tokens.

        Requests whose prefill failed have finished="error" and the exception in `error`. Raises the error of a failed
        decode step, except a lack of memory; the next call repeats the step.
        """
        ahead = self._reads_ahead()
        told, self._untold = self._untold, []
        told += [] if ahead or told else self.batch.read()
        if told:  # of an earlier step; a request gets at most one token per call
            return self._told(told)
        try:
            self._make_way(told)
            told += self._launch()
            if ahead:
                self._place()  # while the device is at earlier work: after read() it has the decode step alone
                told += self.batch.read(ahead=True)
            self._place()  # the host's work from here on overlaps the device's decode step
            request = self._turns.next()
            self.batch.start(POLL if request is None and not self.batch.decoding else 0.0)
            decoded = len(self.batch.decoding)
            request, left = self._turns.begin(request, decoded)
            while request is not None:
                depth, group = request.prefilled, self._turns.group(request, left)
                before = [one.prefilled for one in group]
                told += self._prefill_together(group, decoded) if len(group) > 1 else self._prefill(request, decoded)
                for one, earlier in zip(group, before, strict=True):
                    self._share.serve(one.spec.client, max(0, one.prefilled - max(earlier, one.filled)))
                left -= (sum(one.prefilled for one in group) - depth) * work(depth)
                request = self._turns.fitting(left) if len(group) > 1 or request.prefilled == request.prompt else None
            told += [] if ahead else self.batch.read()
        except BaseException:
            told += [] if ahead else self.batch.read()
            self._untold = [] if self.split else told
            if self.split:  # its processes end
                self._told(told)
            raise
        return self._told(told)

    def _told(self, told: Sequence[Request]) -> list[Request]:
        """Count the tokens, and forget the requests that have ended. Returns all that no client has cancelled."""
        told = [request for request in told if request in self._queue]
        self._turns.ended = []
        for request in told:
            self._share.serve(request.spec.client, OUTPUT)
            if request.finished:
                self._turns.ended.append((self._queue.rank(request)[0], request.spec.client))
                self._queue.forget(request)
        return told

    def _reads_ahead(self) -> bool:
        """Return whether the next step is launched before the tokens of the latest one are read.

        A host index must be known to be built before its request decodes.
        """
        on_host = any(layer.on_host for layer in self.batch.cache.kv.offloaded[:1])
        return self.ahead and not on_host and all(request.matcher is None for request in self.batch.requests)

    def _prefill(self, request: Request, decoded: int) -> list[Request]:
        """Prefill the next chunk of a prompt. Returns the request if it failed.

        decoded: number of tokens that the step decodes.
        """
        self._give_way(request)
        if request.seq < 0:
            return []
        try:
            self.batch.prefill(request, self._turns.chunk(request, decoded))
        except Exception as error:
            if self.split and not isinstance(error, HostMemoryError):
                self._queue.forget(request)  # it has lost its slot; no client is notified
                raise
            if isinstance(error, MEMORY_ERRORS) and (self.batch.requests or self._drop_swapped(error)):
                self._wait_again(request)
                return []
            request.fail(error)
            return [request]
        return []

    def _prefill_together(self, group: Sequence[Request], decoded: int) -> list[Request]:
        """Prefill whole prompts in one forward, or one by one if that fails. Returns the requests that failed."""
        for request in group:
            self._give_way(request)
        left = [request for request in group if request.seq >= 0]
        try:
            if len(left) > 1:
                self.batch.prefill_together(left)
                return []
        except Exception as error:
            _log.info("%d prompts are prefilled one by one: %s", len(left), error)
        return [one for request in left for one in self._prefill(request, decoded)]

    def _give_way(self, coming: Request | None = None) -> None:
        """Queue the requests that lose their slots when the method follows full attention; see Batch.give_way."""
        for request in self.batch.give_way(coming):
            self._preempted(request)

    def _launch(self) -> list[Request]:
        """Launch the decode step. If memory is short, returns requests that got an earlier token or failed instead."""
        self._give_way()
        try:
            self.batch.launch()
        except MEMORY_ERRORS as error:
            if self.split and not isinstance(error, HostMemoryError):
                raise
            told = self.batch.read()
            if told or self._drop_swapped(error):
                return told
            last = max(self.batch.requests, key=self._queue.order)
            self.batch.preempt(last, keep=not isinstance(error, HostMemoryError) and not self.split)
            if self.batch.requests:
                self._wait_again(last)
                return []
            last.fail(error)
            return [last]
        return []

    def _place(self) -> None:
        """Give slots to waiting requests in their order, while there are slots and memory; the last one as `_next` says."""
        if len(self.batch.requests) >= self._short:
            return
        self._short = self.batch.max_seqs
        left = self._prompts_left() if self._queue.waiting and self.batch.free else Counter[str]()
        while self._queue.waiting and self.batch.free:
            request = self._next(left)
            if request is None or not self.batch.admission.fits(request, self.batch.placed, self._queue.waiting):
                return
            preempted = request.swapped is not None
            try:
                self.batch.join(request)
            except Exception as error:
                if self.split or not self.batch.requests:
                    raise
                _log.warning("a request waits until another has ended: %s", error)
                self._short = len(self.batch.requests)
                return  # the others' tokens must still be reported
            self._queue.waiting.remove(request)
            self._share.choose(request.spec.client)
            left[request.spec.client] += 0 if request.decodes else request.prompt - request.prefilled
            self.resumed += preempted and request in self.batch.decoding
            self.recomputed += preempted and request not in self.batch.decoding

    def _next(self, left_of: Mapping[str, int]) -> Request | None:
        """Return the request that gets the next slot, or None. It is the first waiting request, except for the last slot.

        While a long prompt of no higher number is prefilled, the last slot goes to the first short prompt of the same number.
        The processes of a split model may know different prefixes, so there the first request gets every slot.

        left_of: as _prompts_left() returns it.
        """
        first, short = self._queue.first(left_of), self._turns.short
        if self.batch.free > 1 or self.split or not self.batch.requests:
            return first
        priority, left = self._queue.rank(first)[0], self.batch.left
        read = (one for one in self.batch.prefilling if self._queue.rank(one)[0] <= priority)
        if first.prompt <= short or not any(left(one) > short for one in read) or left(first) <= short:
            return first
        if not self.batch.admission.fits(first, self.batch.placed, self._queue.waiting):
            return None
        waiting = self._queue.in_order(left_of)
        return next((one for one in waiting if one.prompt <= short and self._queue.rank(one)[0] == priority), None)

    def _make_way(self, told: list[Request]) -> None:
        """Preempt the last request that can continue later, if a waiting one has a lower priority number. Within a number do so
        if the waiting one's client has no slot and has had less service. The other client has several slots, or the difference
        exceeds the margin. Repeat that for the next waiting request.

        Reads launched tokens first: a slot may be free then.

        told: gets the requests of these tokens.
        """
        repeats = self.batch.cache.kv.sequences.step is not None  # a failed step, which all of its requests must repeat
        if not self._queue.waiting or self.batch.free or self.split or repeats:
            return
        coming = list[Request]()  # they get the slots
        while self.batch.free == len(coming) < len(self._queue.waiting):
            found = self._gives_way(coming)
            if found is None:
                return
            last, first = found
            told += self.batch.read()
            if self.batch.free > len(coming) or last.finished is not None:
                return
            self.batch.preempt(last)
            coming.append(first)
            self._preempted(last)

    def _gives_way(self, coming: Sequence[Request]) -> tuple[Request, Request] | None:
        """Return the request that loses its slot next, and the waiting one that gets it.

        coming: requests that get the free slots.
        """
        first, had = next(one for one in self._in_order() if one not in coming), self._share.had
        held = Counter(one.spec.client for one in [*self.batch.requests, *coming])
        others = [one for one in self.batch.requests if self.batch.continues(one)]
        if not others:
            return None
        last = max(
            others,
            key=lambda one: (self._queue.rank(one)[0], held[one.spec.client], had(one.spec.client), self._queue.rank(one)),
        )
        left = self._prompts_left()
        if self._queue.order(last, left[last.spec.client] - last.prompt + last.prefilled) < self._queue.order(
            first, left[first.spec.client]
        ):
            return None  # it would get its slot back
        urgent = self._queue.rank(last)[0] > self._queue.rank(first)[0]
        more = held[last.spec.client] > 1 or had(first.spec.client) < had(last.spec.client) - self._turns.margin
        if not urgent and (held[first.spec.client] or not more):
            return None
        fits = self.batch.admission.fits(first, [*self.batch.placed, *coming], self._queue.waiting)
        return (last, first) if fits else None

    def _drop_swapped(self, error: Exception) -> bool:
        """Drop the swapped-out state of the last such request in the queue, if host memory is short. Returns whether there was
        one."""
        away = [one for one in self._in_order() if one.swapped is not None]
        if not away or not isinstance(error, HostMemoryError):
            return False
        away[-1].rewind()
        self.recomputed += 1
        return True

    def _in_order(self) -> list[Request]:
        """Return the waiting requests in the order in which they get slots. The prompts that a client has in slots count as if
        they were prefilled."""
        return self._queue.in_order(self._prompts_left())

    def _prompts_left(self) -> Counter[str]:
        """Return how many tokens of prompts in slots are yet to be prefilled, by client."""
        left = Counter[str]()
        for one in self.batch.prefilling:
            left[one.spec.client] += one.prompt - one.prefilled
        return left

    def _preempted(self, request: Request) -> None:
        self.preemptions += 1
        self.recomputed += request.swapped is None
        self._queue.wait(request)

    def _wait_again(self, request: Request) -> None:
        """Queue a request that lost its slot to a lack of memory, until another one has ended."""
        self._preempted(request)
        self._short = max(1, len(self.batch.requests))
