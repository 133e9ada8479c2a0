"""A running batch that requests join and leave between steps. Serving loops build on it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from kvthaw.cache.index_api import Method
from kvthaw.cache.prefix import PrefixCache
from kvthaw.engine.admission import Admission
from kvthaw.engine.batch_prompts import BatchPrompts
from kvthaw.engine.hf import PreTrainedModel, Stats
from kvthaw.engine.hf.attention import unwrap
from kvthaw.engine.hf.batch_cache import BatchCache, check_positions
from kvthaw.engine.hf.cache import sequence_bytes
from kvthaw.engine.hf.chunks import default_chunk
from kvthaw.engine.hf.handle import is_attached
from kvthaw.engine.logprobs import TokenLogprobs
from kvthaw.engine.request import Request, RequestOptions, checked_spec
from kvthaw.engine.slots import Slots, consecutive
from kvthaw.engine.steps import Steps
from kvthaw.errors import CacheError, ConfigError, at_least, first_line
from kvthaw.method_names import AUTO
from kvthaw.typecheck import check_type

_log = logging.getLogger(__name__)
POLL = 0.05  # seconds that a step waits for an index if it has no other work


class Batch:
    """Decode up to `max_seqs` requests together, each with its own length. They join and leave between steps.

    Everything that a step reads is allocated for `capacity` tokens per sequence when the first request joins, at fixed
    addresses. On a GPU, captured steps (see kvthaw.engine.graph_runner) therefore serve any requests. A step computes the
    first 1, 2, 4, 8, ... sequences, the fewest that hold all decoding ones. Under full attention requests move to lower
    slots when others have left. Each of these numbers has a capture for each bucket of lengths (2,048, 8,192, ... tokens). A
    request gets the tokens that it would get alone. A finished request leaves by itself.

    model: as for `Cache`.
    method, and the settings budget, retrieved, dense_layers, seed, block_size, host_bytes, device_memory, full_below,
        kv_dtype: as for `Cache`. A budget is a number of tokens, because a fraction would differ between requests.
    prefill_chunk, capture: as for `attach`.
    prefix_cache: caches the prompts of all requests for later requests with a common prefix.

    Raises ConfigError for a setting out of range, UnsupportedModelError for a model that cannot work, and CacheError for an
    attached model.

    Example::

        batch = kvthaw.Batch(model, "pariskv-plus", max_seqs=8, capacity=32768, budget=512)
        waiting = [...]  # prompts: token ids
        while waiting or batch.requests:
            while waiting and batch.free:
                batch.join(waiting.pop(), max_new_tokens=200)
            for request in batch.step():
                print(request.seq, request.tokens[-1], request.finished)

    step() gives each request with a complete prompt one token, and prefills the next chunk of one other prompt.
    `kvthaw.Scheduler` calls launch(), prefill() and read() instead. It decides better, and queues the requests that wait
    for a slot.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        method: str | Method = AUTO,
        *,
        max_seqs: int,
        capacity: int,
        prefill_chunk: int | None = None,
        capture: bool = True,
        prefix_cache: PrefixCache | None = None,
        **settings: Any,
    ) -> None:
        check_type(int, max_seqs=max_seqs, capacity=capacity)
        check_type(int | None, prefill_chunk=prefill_chunk)
        at_least(1, max_seqs=max_seqs, capacity=capacity, prefill_chunk=prefill_chunk)
        for name in ("budget", "retrieved"):
            limit = settings.get(name, getattr(settings.get("config"), name, None))
            if isinstance(limit, float):
                raise ConfigError(f"{name} is {limit}; a batch needs a number of tokens, no fraction of a prompt")
        model = unwrap(model)
        if is_attached(model):
            raise CacheError("the model is attached; detach its handle first")
        check_positions(model, capacity)
        self.model, self.capacity = model, capacity
        self.cache = BatchCache(model, method, max_seqs=max_seqs, capacity=capacity, **settings)
        self.admission = Admission(self.cache, prefix_cache)
        capture = capture and model.device.type == "cuda"
        room = self.admission.leaves_room
        self.prompts = BatchPrompts(
            model, self.cache, prefix_cache, room, prefill_chunk or default_chunk(model), capture=capture
        )
        self._failed: list[Request] = []  # requests that failed, which read() has not returned
        self.vocabulary: int = model.config.get_text_config(decoder=True).vocab_size
        self._steps = Steps(model, self.cache, self.vocabulary, capture=capture)
        self._slots = Slots(model, self.cache, self.prompts, self._steps)
        if not self.cache.states:  # steps with them always compute all sequences
            self.cache.kv.chooser.seq_bytes = functools.cache(
                functools.partial(sequence_bytes, model, self.cache.settings.method, capacity, self.cache.config)
            )
        self.method = method.partition(":")[0] if isinstance(method, str) else method.name  # as asked, "auto" among them
        self.launched: Callable[[], object] = lambda: None  # called when a step is on the device, before its tokens are read

    @property
    def prefix_cache(self) -> PrefixCache | None:
        """The cache of earlier prompts."""
        return self.prompts.prefixes

    @property
    def requests(self) -> list[Request]:
        """Requests that have a slot and have not ended, by slot."""
        return [request for request in self.placed if request.finished is None]

    @property
    def placed(self) -> list[Request]:
        """Requests that hold a slot, by slot: also ended ones that a launched step still computes."""
        return [request for request in self._slots.held if request is not None]

    @property
    def unread(self) -> bool:
        """Whether read() has tokens or failed requests to return."""
        return bool(self._steps or self._failed)

    @property
    def decoding(self) -> list[Request]:
        r"""Requests that the next step decodes, by slot: their prompts are prefilled and indexed."""
        return [request for request in self._slots.held if request is not None and request.decodes]

    @property
    def prefilling(self) -> list[Request]:
        r"""Requests that do not decode yet, in order of arrival: their prompt or index is incomplete."""
        coming = [one for one in self._slots.held if one is not None and not one.decodes and one.finished is None]
        return sorted(coming, key=lambda one: one.arrived)

    @property
    def max_seqs(self) -> int:
        r"""Number of slots. It is below the requested number after give_way()."""
        return self.cache.kv.sequences.count

    @property
    def free(self) -> int:
        r"""Number of free slots."""
        return self._slots.held[: self.max_seqs].count(None)

    def left(self, request: Request) -> int:
        """Return how many tokens of a request's prompt the model has yet to read, if the request has a place or gets one now."""
        if request.swapped is not None:
            return 0
        return request.prompt - (self.prompts.known(request) if request.seq < 0 else request.prefilled)

    def stats(self) -> Stats:
        """Return statistics of the batch's cache, over all requests so far."""
        return self.cache.stats()

    def join(self, prompt: Tensor | Sequence[int] | Request, **how: Unpack[RequestOptions]) -> Request:
        """Put a prompt into a free slot and return its request at once. Later steps prefill it and decode its tokens.

        Raises CacheError if no slot is free, else as request(). The batch is then unchanged.

        prompt, how: as for request(), or a request that is in no slot. For several outputs, join one request for each of
            `sampling.split(n)`.
        """
        if not self.free:
            raise CacheError(f"all {self.max_seqs} sequences are taken; one must leave first")
        request = self.request(prompt, **how)
        if request.finished or self._slots.holds(request):
            raise CacheError(f"the request {'has finished' if request.finished else 'is in the batch'}")
        self._slots.place(request)
        return request

    def request(self, prompt: Tensor | Sequence[int] | Request, **how: Unpack[RequestOptions]) -> Request:
        """Make a request without joining it; a Request is returned as it is.

        Touches neither batch nor device, so any thread may call it during a step. Raises ConfigError for a prompt that does
        not fit or has invalid token ids, and for settings that cannot be met.

        prompt: token ids, at least one, [T] or [1, T].
        how: see RequestOptions.
        """
        if isinstance(prompt, Request):
            if how:
                raise ConfigError(f"{next(iter(how))} is given together with a request, which has its own")
            return prompt
        spec = checked_spec(prompt, self.model, self.capacity, self.vocabulary, **how)
        self._steps.sampler.check(spec.sampling, spec.stop)
        return Request(spec)

    def prefill(self, request: Request, tokens: int | None = None) -> None:
        """Prefill the next tokens of a request's prompt.

        The first token is sampled with the last chunk; read() returns it. If indexes are still being built, start() samples
        it later, and further calls do nothing. In models with linear attention the whole prompt is one chunk. If the prefill
        fails, the request loses its slot and may join again; the batch is unchanged.

        tokens: how many, in chunks of at most `prefill_chunk`; None: one chunk.
        """
        if request in self.prompts.indexing:
            return
        try:
            self.prompts.prefill(request, tokens)
            # else start() builds them after the others' next tokens
            if request in self.prompts.indexing and self.cache.kv.built(request.seq, build=False):
                self._slots.start(request)
                self._slots.first([request])
                self._steps.replay.prepare()  # while the device runs the prompt
        except BaseException:
            self.preempt(request, keep=False)  # to be prefilled again, since its prompt is incomplete
            raise

    def continues(self, request: Request) -> bool:
        """Return whether a request that is preempted now would continue later from where it is."""
        kept = self.prompts.continues(request)
        return kept or not request.prefilled or request.decodes

    def prefill_together(self, requests: Sequence[Request]) -> None:
        """Prefill the whole prompts of several requests in one forward, one after the other in its only row.

        The host takes as long for one forward of several short prompts as for that of one. Each prompt attends to itself
        alone. A prompt with a cached prefix only starts with it; prefill() continues it. If the forward fails, all of them
        keep their slots, and none is prefilled.

        requests: in slots, for which `prompts.shares` is true.
        """
        try:
            whole = self.prompts.together(requests)
        except BaseException:
            for request in requests:
                self._slots.begin_again(request)
            raise
        self._start_indexed(whole, build=False)

    def start(self, timeout: float | None = 0.0) -> None:
        """Start decoding requests whose indexes are complete, and sample their first tokens.

        read() returns these tokens, and the requests whose index failed, with finished="error" and the exception in `error`.

        timeout: seconds to wait for indexes; None: without limit.
        """
        self._start_indexed(list(self.prompts.indexing), timeout)

    def _start_indexed(self, requests: Sequence[Request], timeout: float | None = 0.0, *, build: bool = True) -> None:
        """Start requests whose prompts are whole, as start() does; build as for KVCache.built."""
        started = list[Request]()
        for request in requests:
            try:
                if self.cache.kv.built(request.seq, timeout, build=build):
                    self._slots.start(request)
                    started.append(request)
            except Exception as error:
                self._fail(request, error)
        for run in consecutive(sorted(started, key=lambda one: one.seq)):
            self._first(run)
        if started:
            self._steps.replay.prepare()  # while the device runs the prompts

    def _first(self, run: Sequence[Request]) -> None:
        """Sample the first tokens of requests in consecutive slots; one by one if that fails."""
        try:
            self._slots.first(run)
        except Exception as error:
            if len(run) == 1:
                self._fail(run[0], error)
                return
            for request in run:
                try:
                    self._steps.join(request)  # again: a draw that failed may have counted a token
                except Exception as own:
                    self._fail(request, own)
                else:
                    self._first([request])

    def _fail(self, request: Request, error: Exception) -> None:
        """Take a request's slot away, and let read() return it."""
        self.preempt(request, keep=False)
        request.fail(error)
        self._failed.append(request)

    def decode(self) -> list[Request]:
        """Decode one token of every request that can; see launch(). Returns the requests that got one."""
        self.launch()
        return self.read()

    def launch(self) -> None:
        """Launch a decode step for every request that can decode. read() returns its tokens.

        The step before may be unread: the device then feeds its tokens itself, and a request that ends with one of them is
        computed once more for nothing. A request that waits for its last token takes no part.

        A request whose keys or values were not finite in an earlier step fails.

        If launch() raises, the next call repeats the step. Requests whose state a repetition needs but has lost (linear
        attention) restart with their prompts and keep their tokens. Raises CacheError if a request with a grammar has an
        unread token, which the grammar must see first.
        """
        self._steps.earlier = len(self._steps)
        self._fail_nonfinite()
        if self.cache.kv.sequences.step is None:  # else the step is repeated
            self._slots.close_up()
        for request in self.decoding:
            if request.matcher is not None and request.unread:
                raise CacheError("a request with a grammar has an unread token; call read() first")
            if request.fed + 1 >= request.spec.limit and request.seq not in self.cache.kv.sequences.paused:
                self.cache.kv.pause(request.seq)
        sequences = self.cache.kv.sequences
        live = {one.seq: one for one in self.decoding if one.seq not in sequences.paused}
        if not live:
            return
        # transformers' states hold all sequences
        rows = self.max_seqs if self.cache.states else min(self.max_seqs, 1 << max(live).bit_length())
        commits = sequences.commits
        try:
            self._steps.launch([live.get(seq) for seq in range(rows)])
        except BaseException:
            if self.cache.states or sequences.commits != commits:
                self._steps.settle()
                for request in live.values():
                    self._slots.begin_again(request)
            raise
        self.launched()

    def _fail_nonfinite(self) -> None:
        """Fail the requests whose keys or values were not finite in an earlier step. Raises CacheError for a split model, whose
        processes may notice in different steps."""
        finite = self.cache.kv.finite
        if self.cache.settings.ranks.size > 1:
            finite.check()
        for seq, error in finite.found().items():
            request = self._slots.held[seq]
            if request is not None and request.decodes:
                self._fail(request, error)

    def read(self, *, ahead: bool = False) -> list[Request]:
        """Wait for tokens that were launched. Returns the requests that got one or ended, which have left the batch.

        ahead: leave the tokens of the latest step, and those launched after it, to a later call, so that the device works on
            them meanwhile. Without effect if no request is left that they could belong to.
        """
        told, self._failed = self._failed, []
        while self._steps and (self._steps.earlier or not ahead or not self.decoding):
            for request, at, token, scores in self._steps.pop():
                if request.decodes:
                    told += self._take(request, at, token, scores)
                elif request.finished and not request.unread and request in self._slots.held:
                    self._slots.free(request)
        if not self.decoding:  # no step will follow
            self.cache.kv.finish_clear()
        return told

    def _take(self, request: Request, at: int, token: int, scores: TokenLogprobs | None) -> list[Request]:
        """Append a token to a request, at an index of its output. Returns the request if the token is new or it failed."""
        if not request.checked:  # it is the first
            try:
                self._slots.check_prompt(request)
            except Exception as error:
                request.decodes = False  # so that its prompt is not kept
                self.preempt(request, keep=False)
                request.fail(error)
                return [request]
        new = request.take(token, scores, at)
        if request.finished:
            self._slots.release(request)
        return [request] if new else []

    def step(self) -> list[Request]:
        """Decode one token of every request that can, and prefill the next chunk of the first other one.

        Returns the requests that got a token or ended, failed prefills with `error` set. If the decode step raises, the
        next call repeats it.
        """
        told = self.decode()
        coming = [request for request in self.prefilling if request not in self.prompts.indexing]
        self.start(0.0 if told or coming else POLL)
        for request in coming[:1]:
            try:
                self.prefill(request)
            except Exception as error:
                request.fail(error)
                told.append(request)
        return told + self.read()

    def leave(self, request: Request) -> None:
        """Remove a request before it has finished. Raises CacheError if it is not in the batch."""
        if not self._slots.holds(request):
            raise CacheError(f"the request of sequence {request.seq} is not in the batch")
        request.finished = "left"
        if not request.decodes:
            self.prompts.keep_part(request)
        self._steps.settle(request)
        self._slots.release(request, later=False)

    def preempt(self, request: Request, *, keep: bool = True) -> bool:
        """Take a request's slot away. It may join again, and its tokens will be the same.

        Returns whether its state was moved to host memory. Else prompt and tokens are prefilled again.

        keep: swap the state of a decoding request to host memory. This fails if the index cannot be swapped out, host
            memory is short, or a token of the request is unread. Of an incomplete prompt, keep what is prefilled in the
            prefix cache.
        """
        self._slots.preempt(request, keep=keep)
        return request.swapped is not None

    def give_way(self, coming: Request | None = None) -> list[Request]:
        """Switch from full attention to the method now, if device_memory then holds fewer sequences than there are slots.

        Does nothing unless the method would apply from the next decode step on, or from the next tokens of `coming`'s
        prompt. Returns the requests that lost their slots. They may join again, as after preempt().
        """
        kv = self.cache.kv
        found = kv.chooser.narrows(None if coming is None else {coming.seq: coming.prompt - coming.prefilled})
        if found is None:
            return []
        self._steps.settle()
        for request in self.placed:
            if request.finished:  # the device is done with it
                self._slots.free(request)
        kv.finish_clear()
        reason, seqs = found
        lost = [request for request in self.requests if request.seq >= seqs]
        for request in lost:
            self.preempt(request, keep=False)
        try:
            with torch.inference_mode(False), torch.no_grad():
                kv.chooser.try_change(reason, seqs)
        except torch.OutOfMemoryError as error:
            _log.warning("the last layers go on with full attention, device memory is short: %s", first_line(error))
        return lost
