"""A running batch that requests join and leave between steps. Serving loops build on it."""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Unpack

import torch
from torch import Tensor

from kvthaw.cache.index_api import RECENT_QUERIES, Method
from kvthaw.cache.passes import expect, wait_indexed
from kvthaw.cache.prefix import PrefixCache
from kvthaw.cache.state import SequenceState
from kvthaw.engine.admission import Admission
from kvthaw.engine.graph_runner import StaticGraphs, capturable
from kvthaw.engine.hf import PreTrainedModel, Stats
from kvthaw.engine.hf.attention import unwrap
from kvthaw.engine.hf.batch_cache import BatchCache, check_positions, packs
from kvthaw.engine.hf.cache import sequence_bytes
from kvthaw.engine.hf.cache_argument import CACHE
from kvthaw.engine.hf.chunks import CHUNK, spans
from kvthaw.engine.hf.fused import fused, fusing
from kvthaw.engine.hf.handle import is_attached
from kvthaw.engine.hf.prompt_graphs import prompt_graphs
from kvthaw.engine.logprobs import Drawn, TokenLogprobs, logprobs, score
from kvthaw.engine.request import Request, RequestOptions, checked_spec
from kvthaw.engine.sampling import Sampler
from kvthaw.errors import CacheError, ConfigError, HostMemoryError, at_least, first_line
from kvthaw.kernels.gpu import sent, upload
from kvthaw.method_names import AUTO
from kvthaw.typecheck import check_type

_log = logging.getLogger(__name__)
POLL = 0.05  # seconds that a step waits for an index if it has no other work
REPLAYS = 8
"""Most captured forwards that are replayed one by one instead of launching one forward. Each reads all weights, 5 ms for 8B on an
H100."""
_SCORED = 4096  # prompt tokens per forward if all their logits are needed


def _reusable(request: Request) -> Tensor:
    """Return the tokens of a prompt to look up in the prefix cache, which never gives the last RECENT_QUERIES of them."""
    return request.spec.ids[: request.reusable + RECENT_QUERIES] if request.reusable else request.spec.ids[:0]


@dataclass(frozen=True, slots=True)
class _Unread:
    """Tokens that the device samples and the host has not read.

    read: waits for them, and returns them with their log-probabilities, by row.
    rows: of each request: its row, and the index of its token in its output.
    first: whether they are the first tokens of prompts.
    """

    read: Callable[[], tuple[list[int], list[TokenLogprobs] | None]]
    rows: list[tuple[int, Request, int]]
    first: bool


class Batch:
    """Decode up to `max_seqs` requests together, each with its own length. They join and leave between steps.

    Everything that a step reads is allocated for `capacity` tokens per sequence when the first request joins, at fixed
    addresses. On a GPU, captured steps (see kvthaw.engine.graph_runner) therefore serve any requests. A step computes the
    first 1, 2, 4, 8, ... sequences, the fewest that hold all decoding ones. Each of these numbers has a capture for each
    bucket of lengths (2,048, 8,192, ... tokens). A request gets the tokens that it would get alone. A finished request
    leaves by itself.

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
        prefill_chunk: int = CHUNK,
        capture: bool = True,
        prefix_cache: PrefixCache | None = None,
        **settings: Any,
    ) -> None:
        check_type(int, max_seqs=max_seqs, capacity=capacity, prefill_chunk=prefill_chunk)
        at_least(1, max_seqs=max_seqs, capacity=capacity, prefill_chunk=prefill_chunk)
        for name in ("budget", "retrieved"):
            limit = settings.get(name, getattr(settings.get("config"), name, None))
            if isinstance(limit, float):
                raise ConfigError(f"{name} is {limit}; a batch needs a number of tokens, no fraction of a prompt")
        model = unwrap(model)
        if is_attached(model):
            raise CacheError("the model is attached; detach its handle first")
        check_positions(model, capacity)
        self.capacity, self.prefill_chunk = capacity, prefill_chunk
        self.cache = BatchCache(model, method, max_seqs=max_seqs, capacity=capacity, **settings)
        self.model, self.prefix_cache, self.admission = model, prefix_cache, Admission(self.cache, prefix_cache)
        self._seqs: list[Request | None] = [None] * max_seqs  # requests that have a slot
        self._decoding = list(self._seqs)  # of these, requests whose prompts are prefilled and indexed
        self._indexing: dict[Request, Tensor] = {}  # the last logits of prompts whose indexes are being built
        self._unread = deque[_Unread]()  # oldest first
        self._earlier = 0  # how many of them were launched before the latest step
        self._failed: list[Request] = []  # requests that could not start, which read() has not returned
        self._joined: list[Request] = []  # requests that have a slot, in order of arrival
        self.vocabulary: int = model.config.get_text_config(decoder=True).vocab_size
        self._sampler = Sampler(max_seqs, self.vocabulary, model.device)
        self._latest = torch.zeros(max_seqs, dtype=torch.int64, device=model.device)  # the latest token of each sequence
        self._forward, self._packs = fusing(model, model.forward), packs(self.cache)
        self._capture = capture and model.device.type == "cuda"
        self.prompt_graphs = prompt_graphs(model, self.cache) if self._capture else None
        if not self.cache.states:  # steps with them always compute all sequences
            self.cache.kv.chooser.seq_bytes = functools.cache(
                functools.partial(sequence_bytes, model, self.cache.settings.method, capacity, self.cache.config)
            )
        self.method = method.partition(":")[0] if isinstance(method, str) else method.name  # as asked, "auto" among them
        self.launched: Callable[[], object] = lambda: None  # called when a step is on the device, before its tokens are read

    @property
    def requests(self) -> list[Request]:
        """Requests that have a slot and have not ended, by slot."""
        return [request for request in self.placed if request.finished is None]

    @property
    def placed(self) -> list[Request]:
        """Requests that hold a slot, by slot: also ended ones that a launched step still computes."""
        return [request for request in self._seqs if request is not None]

    @property
    def unread(self) -> bool:
        """Whether read() has tokens or failed requests to return."""
        return bool(self._unread or self._failed)

    @property
    def decoding(self) -> list[Request]:
        r"""Requests that the next step decodes, by slot: their prompts are prefilled and indexed."""
        return [request for request in self._decoding if request is not None]

    @property
    def prefilling(self) -> list[Request]:
        r"""Requests that do not decode yet, in order of arrival: their prompt or index is incomplete."""
        return [request for request in self._joined if self._decoding[request.seq] is not request]

    @property
    def max_seqs(self) -> int:
        r"""Number of slots. It is below the requested number after give_way()."""
        return self.cache.kv.sequences.count

    @property
    def free(self) -> int:
        r"""Number of free slots."""
        return self._seqs[: self.max_seqs].count(None)

    def streams_back(self, request: Request) -> bool:
        """Return whether the next chunk of a prompt may read earlier KV over the bus."""
        kv, split = self.cache.kv, self.cache.kv.settings.ranks.size > 1  # where blocks lie may differ between processes
        stores = [layer.store for layer in kv.allocated if self.model.device.type == "cuda"]
        return any(split or not block.on_device for store in stores for block in store.blocks(request.seq))

    def left(self, request: Request) -> int:
        """Return how many tokens of a request's prompt the model has yet to read, if the request has a place or gets one now."""
        if request.swapped is not None:
            return 0
        known = request.prefilled
        if self.prefix_cache is not None and request.seq < 0:
            known = self.prefix_cache.known(self.cache.kv, _reusable(request), salt=request.spec.salt)
        return request.prompt - known

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
        if request.finished or request in self._joined:
            raise CacheError(f"the request {'has finished' if request.finished else 'is in the batch'}")
        seq = self._seqs.index(None)
        wait_indexed(self.cache.kv.offloaded)  # not for the step under way: the host proceeds to the prompt meanwhile
        self.cache.kv.clear(seq)  # steps also wrote to it while it was empty
        self.cache.kv.sequences.ends[seq] = request.prompt + request.spec.limit
        request.place(seq, self.model)
        self._seqs[seq] = request
        self._joined.append(request)
        if request.swapped is not None:
            self._swap_in(request, request.swapped)
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
        self._sampler.check(spec.sampling, spec.stop)
        return Request(spec)

    def prefill(self, request: Request, tokens: int | None = None) -> None:
        """Prefill the next tokens of a request's prompt.

        The first token is sampled with the last chunk; read() returns it. If indexes are still being built, start() samples
        it later, and further calls do nothing. In models with linear attention the whole prompt is one chunk. If the prefill
        fails, the request loses its slot and may join again; the batch is unchanged.

        tokens: how many, in chunks of at most `prefill_chunk`; None: one chunk.
        """
        sequences, first = self.cache.kv.sequences, request.prefilled == 0
        if request in self._indexing:
            return
        try:
            if first:
                if not self._reuse(request, tokens):
                    return
                sequences.pause(request.seq)
            start = request.prefilled
            stop = request.prompt if self.cache.prefills_whole else min(request.prompt, start + (tokens or self.prefill_chunk))
            logits = self._prefill(request, start, stop)
            request.prefilled = stop
            if start or stop < request.prompt:
                coming = request.prompt if stop < request.prompt else 0
                expect(self.cache.kv.allocated, self.cache.kv.streams, request.seq, coming)
            self.cache.kv.finite.prompt([request.seq], self.cache.kv.offloaded)
            if stop == request.prompt:
                self._indexing[request] = logits
                if self.cache.kv.built(request.seq, build=False):  # else start() builds them after the others' next tokens
                    self._start(request)
        except BaseException:
            self.preempt(request, keep=False)  # to be prefilled again, since its prompt is incomplete
            raise

    def shares_forward(self, request: Request) -> bool:
        """Return whether a request's prompt may share a forward with others; see prefill_together()."""
        return self._packs and request.spec.shares_forward and not (request.prefilled or request in self._indexing)

    def continues(self, request: Request) -> bool:
        """Return whether a request that is preempted now would continue later from where it is."""
        prefixes = None if self.cache.prefills_whole else self.prefix_cache
        fills = prefixes is not None and prefixes.refused is None and request.spec.embeddings is None
        kept = fills and request not in self._indexing
        return kept or not request.prefilled or self._decoding[request.seq] is request

    def replays(self, request: Request) -> bool:
        """Return whether a request's whole prompt can be prefilled by a captured forward."""
        graphs, fits = self.prompt_graphs, request.prompt <= self.prefill_chunk
        return graphs is not None and fits and self.shares_forward(request) and graphs.serves(request.prompt)

    def replay_together(self, requests: Sequence[Request]) -> bool:
        """Return whether captured forwards prefill these prompts one by one faster than one forward does together."""
        graphs, few = self.prompt_graphs, len(requests) <= REPLAYS
        if graphs is None or not few or not all(map(self.replays, requests)):
            return False
        return sum(graphs.padded(one.prompt) for one in requests) <= graphs.lengths[-1]

    def prefill_together(self, requests: Sequence[Request]) -> None:
        """Prefill the whole prompts of several requests in one forward, one after the other in its only row.

        The host takes as long for one forward of several short prompts as for that of one. Each prompt attends to itself
        alone. A prompt with a cached prefix only starts with it; prefill() continues it. If the forward fails, all of them
        keep their slots, and none is prefilled.

        requests: in slots, for which shares_forward() is true.
        """
        kv, device, started = self.cache.kv, self._sampler.device, requests
        try:
            for request in started:
                self._reuse(request, None)
                kv.sequences.pause(request.seq)
            requests = [request for request in started if not request.prefilled]
            if not requests:
                return
            ids = torch.cat([request.inputs(0, request.prompt)["input_ids"] for request in requests], dim=1)
            positions = torch.cat([torch.arange(request.prompt, device=device) for request in requests])[None]
            ends = upload([n - 1 for n in accumulate(request.prompt for request in requests)], torch.int64, device)
            how = {"position_ids": positions, "logits_to_keep": ends}
            with kv.sequences.prompts({one.seq: one.prompt for one in requests}), torch.no_grad(), fused(self.model):
                logits = self.model(input_ids=ids, **{CACHE: self.cache}, use_cache=True, **how).logits
            kv.finite.prompt([request.seq for request in requests], kv.offloaded)
        except BaseException:
            for request in started:
                self._begin_again(request)
            raise
        for i, request in enumerate(requests):
            request.prefilled, self._indexing[request] = request.prompt, logits[:, i]
        self._start_indexed(requests, build=False)

    def start(self, timeout: float | None = 0.0) -> None:
        """Start decoding requests whose indexes are complete, and sample their first tokens.

        read() returns these tokens, and the requests whose index failed, with finished="error" and the exception in `error`.

        timeout: seconds to wait for indexes; None: without limit.
        """
        self._start_indexed(list(self._indexing), timeout)

    def _start_indexed(self, requests: Sequence[Request], timeout: float | None = 0.0, *, build: bool = True) -> None:
        """Start requests of self._indexing, as start() does; build as for KVCache.built."""
        for request in requests:
            try:
                if self.cache.kv.built(request.seq, timeout, build=build):
                    self._start(request)
            except Exception as error:
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

        If launch() raises, the next call repeats the step. Requests whose state a repetition needs but has lost (linear
        attention) restart with their prompts and keep their tokens. Raises CacheError if a request with a grammar has an
        unread token, which the grammar must see first.
        """
        self._earlier = len(self._unread)
        for request in self.decoding:
            if request.matcher is not None and request.unread:
                raise CacheError("a request with a grammar has an unread token; call read() first")
            if request.fed + 1 >= request.spec.limit and request.seq not in self.cache.kv.sequences.paused:
                self.cache.kv.pause(request.seq)
        waits = self.cache.kv.sequences.paused
        step = [None if one is None or one.seq in waits else one for one in self._decoding]
        live, sequences = [one for one in step if one is not None], self.cache.kv.sequences
        if not live:
            return
        # transformers' states hold all sequences
        rows = self.max_seqs if self.cache.states else min(self.max_seqs, 1 << live[-1].seq.bit_length())
        seqs, commits = slice(0, rows), sequences.commits
        at = [(one.known, one.prompt + one.fed) if one else (0, 0) for one in step[seqs]]
        ids, positions = upload(at, torch.int64, self._sampler.device)[:, :, None].unbind(1)
        if any(known < 0 for known, _ in at):
            ids = torch.where(ids < 0, self._latest[seqs, None], ids)
        try:
            with torch.no_grad():
                logits = self._replay(ids, positions)[:, -1]
                drawn = self._sampler(logits, positions[:, 0] + 1, seqs)
                unread = self._coming(drawn, seqs, [(one.seq, one, one.fed + 1) for one in live])
            self._replay.run_ahead()  # while the device runs the step
        except BaseException:
            if self.cache.states or sequences.commits != commits:
                self._settle()
                for request in live:
                    self._begin_again(request)
            raise
        self._unread.append(unread)
        for request in live:
            request.fed += 1
            request.unread += 1
        self.launched()

    def read(self, *, ahead: bool = False) -> list[Request]:
        """Wait for tokens that were launched. Returns the requests that got one or ended, which have left the batch.

        ahead: leave the tokens of the latest step, and those launched after it, to a later call, so that the device works on
            them meanwhile. Without effect if no request is left that they could belong to.
        """
        told, self._failed = self._failed, []
        while self._unread and (self._earlier or not ahead or not self.decoding):
            unread, self._earlier = self._unread.popleft(), max(0, self._earlier - 1)
            tokens, scores = unread.read()
            for row, request, at in unread.rows:
                request.unread -= 1
                if request.seq >= 0 and self._decoding[request.seq] is request:
                    told += self._take(request, tokens[row], scores[row] if scores else None, at, first=unread.first)
                elif request.finished and not request.unread and request in self._seqs:
                    self._free(request)
        if not self.decoding:  # no step will follow
            self.cache.kv.finish_clear()
        return told

    def _take(self, request: Request, token: int, scores: TokenLogprobs | None, at: int, *, first: bool) -> list[Request]:
        """Append a token to a request, at an index of its output. Returns the request if the token is new or it failed."""
        if first:
            try:
                self._check_prompt(request)
            except Exception as error:
                self._decoding[request.seq] = None  # so that its prompt is not kept
                self.preempt(request, keep=False)
                request.fail(error)
                return [request]
        new = request.take(token, scores, at)
        if request.finished:
            self._release(request)
        return [request] if new else []

    def step(self) -> list[Request]:
        """Decode one token of every request that can, and prefill the next chunk of the first other one.

        Returns the requests that got a token or ended, failed prefills with `error` set. If the decode step raises, the
        next call repeats it.
        """
        told = self.decode()
        coming = [request for request in self.prefilling if request not in self._indexing]
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
        if request not in self._joined:
            raise CacheError(f"the request of sequence {request.seq} is not in the batch")
        request.finished = "left"
        if self._decoding[request.seq] is not request:
            self._keep_part(request)
        self._settle(request)
        self._release(request, later=False)

    def preempt(self, request: Request, *, keep: bool = True) -> bool:
        """Take a request's slot away. It may join again, and its tokens will be the same.

        Returns whether its state was moved to host memory. Else prompt and tokens are prefilled again.

        keep: swap the state of a decoding request to host memory. This fails if the index cannot be swapped out, host
            memory is short, or a token of the request is unread. Of an incomplete prompt, keep what is prefilled in the
            prefix cache.
        """
        swapped = None
        self._settle(request)
        if keep and self._decoding[request.seq] is not request:
            self._keep_part(request)
        if keep and self._decoding[request.seq] is request and not request.unread:
            try:
                swapped = self.cache.swap_out(request.seq)
            except (CacheError, HostMemoryError, torch.OutOfMemoryError) as error:
                _log.info("a request that is preempted begins again: %s", error)
            else:
                self._decoding[request.seq] = None
        self._release(request, later=False)
        self._drop_unread(request)
        request.seq = -1
        if swapped is None:
            request.rewind()
        request.swapped = swapped
        return swapped is not None

    def give_way(self, coming: Request | None = None) -> list[Request]:
        """Switch from full attention to the method now, if device_memory then holds fewer sequences than there are slots.

        Does nothing unless the method would apply from the next decode step on, or from the next tokens of `coming`'s
        prompt. Returns the requests that lost their slots. They may join again, as after preempt().
        """
        kv = self.cache.kv
        found = kv.chooser.narrows(None if coming is None else {coming.seq: coming.prompt - coming.prefilled})
        if found is None:
            return []
        self._settle()
        for request in self.placed:
            if request.finished:  # the device is done with it
                self._free(request)
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

    def _swap_in(self, request: Request, swapped: SequenceState) -> None:
        """Swap in a preempted request, or restart it if its state cannot return."""
        request.swapped = None
        try:
            self.cache.swap_in(request.seq, swapped)
            how = request.spec.sampling, request.spec.ids, request.spec.stop, request.matcher, request.tokens
            self._sampler.join(request.seq, *how)
        except Exception as error:
            _log.info("a request that was preempted begins again: %s", error)
            self._begin_again(request)
            return
        self._decoding[request.seq] = request

    def _coming(self, drawn: Drawn, seqs: slice, rows: list[tuple[int, Request, int]], *, first: bool = False) -> _Unread:
        """Start to copy sampled tokens to the host; on the device, the next step feeds them."""
        self._latest[seqs] = drawn.tokens
        return _Unread(drawn.fetch(), rows, first)

    def _start(self, request: Request) -> None:
        """Sample the first token of a request whose prompt is prefilled and indexed."""
        self.cache.kv.resume(request.seq)
        self.cache.states.place(request.seq)
        self._sampler.join(request.seq, request.spec.sampling, request.spec.ids, request.spec.stop, request.matcher)
        at, place = upload([request.prompt], torch.int64, self._sampler.device), slice(request.seq, request.seq + 1)
        drawn = self._sampler(self._indexing.pop(request), at, place)
        self._unread.append(self._coming(drawn, place, [(0, request, 0)], first=True))
        request.unread += 1
        self._replay.prepare()  # while the device runs the prompt
        self._decoding[request.seq] = request

    def _check_prompt(self, request: Request) -> None:
        """Cache a prompt in the prefix cache, once it has arrived on the host. Raises CacheError if it was not finite."""
        self.cache.kv.finite.end(request.seq)
        self.cache.wait()
        request.checked = True
        self._keep(request, request.prompt % self.cache.settings.block_size)  # decoding writes into the last block

    def _settle(self, request: Request | None = None) -> None:
        """Wait until the device has run all launched work, if a request takes part in it; None: in any case."""
        if self._unread and (request is None or request.unread):
            self._unread[-1].read()

    def _drop_unread(self, request: Request) -> None:
        """Drop launched tokens of a request that the model computes again."""
        for unread in self._unread if request.unread else ():
            unread.rows[:] = [row for row in unread.rows if row[1] is not request]
        request.unread = 0

    def _begin_again(self, request: Request) -> None:
        """Restart a request in its slot, which is emptied. The device runs no step of it."""
        self._decoding[request.seq] = None
        self._empty(request.seq)
        self._drop_unread(request)
        request.rewind()

    def _empty(self, seq: int, *, later: bool = False) -> None:
        self._sampler.leave(seq)
        self.cache.kv.clear(seq, later=later)
        self.cache.states.clear(seq)

    def _prefill(self, request: Request, start: int, stop: int) -> Tensor:
        """Prefill tokens start .. stop of a request's prompt. Returns the logits [1, V] after the last."""
        cache, seq = self.cache, request.seq
        n = None if request.tokens else request.spec.sampling.prompt_logprobs
        some = {"logits_to_keep": 1} if n is None and self.model._supports_logits_to_keep() else {}
        most = self.prefill_chunk if n is None else min(self.prefill_chunk, _SCORED)
        chunk = request.prompt if self.cache.prefills_whole else most
        logits = torch.empty(0)
        if self.prompt_graphs is not None and (start, stop) == (0, request.prompt) and self.replays(request):
            with cache.kv.sequences.prompts({seq: stop}):
                return self.prompt_graphs(request.inputs(0, stop)["input_ids"])
        prompt, states = cache.kv.sequences.prompts({seq: request.prompt - start}), cache.states.filling(seq)
        with prompt, states, torch.no_grad(), fused(self.model):
            for begin, end in spans(stop - start, chunk):
                begin, end = start + begin, start + end
                every = self.model(**request.inputs(begin, end), **{CACHE: self.cache}, use_cache=True, **some).logits
                logits = every[:, -1]
                if n is not None:
                    next_ids = sent(request.spec.ids[begin + 1 : end + 1], every.device)
                    request.prompt_logprobs = request.prompt_logprobs[: begin + 1] or [None]
                    request.prompt_logprobs += logprobs(score(every[0, : len(next_ids)], next_ids, n))
        return logits

    @property
    def _replay(self) -> StaticGraphs:
        cache = self.cache
        if not isinstance(cache.replay, StaticGraphs):
            captured = self._capture and capturable(cache) is None
            cache.replay = StaticGraphs(self._forward, cache, capture=captured)
        return cache.replay

    def _reuse(self, request: Request, tokens: int | None) -> bool:
        """Start a prompt with its cached prefix, once the prefix is in memory. Returns whether this is done.

        tokens: how many to read from the file in this call.
        """
        prefixes, kv, ids = self.prefix_cache, self.cache.kv, _reusable(request)
        if prefixes is None:
            return True
        request.fetched += tokens or request.prompt  # so that this ends even if memory is short
        if request.fetched < request.prompt and prefixes.fetch(kv, ids, tokens or 0, salt=request.spec.salt):
            return False
        request.filled = request.prefilled = prefixes.fill(kv, ids, seq=request.seq, salt=request.spec.salt)
        request.cached_tokens, request.begun = (request.cached_tokens if request.begun else request.filled), True
        return True

    def _keep(self, request: Request, but: int) -> None:
        """Cache a complete prompt: all of it if it still needs its name, else without the last `but` tokens."""
        if self.prefix_cache is not None and request.spec.embeddings is None:
            how = self._naming(request)
            tokens = request.prompt - (0 if how else but)
            try:
                self.prefix_cache.keep(self.cache.kv, request.spec.ids[:tokens], seq=request.seq, salt=request.spec.salt, **how)
            except Exception as error:  # no room for a named entry, or no memory
                request.error = error if how else request.error
                _log.info("a prompt is not kept: %s", error)

    def _naming(self, request: Request) -> dict[str, Any]:
        """Return the arguments that name a complete prompt in the prefix cache, once; empty if it has no name."""
        if request.spec.name is None or request.named:
            return {}
        request.named = True
        return {"name": request.spec.name, "about": request.spec.about, "leaves_room": self.admission.leaves_room}

    def _keep_part(self, request: Request) -> None:
        """Cache what was prefilled of an incomplete prompt, for the next try."""
        kv, tokens, whole = self.cache.kv, request.prefilled, request.prefilled == request.prompt
        if self.prefix_cache is None or request.spec.embeddings is not None or tokens <= (0 if whole else request.filled):
            return
        try:
            kv.finite.end(request.seq)
            self.cache.wait()
            how = self._naming(request) if whole else {}
            self.prefix_cache.keep(kv, request.spec.ids[:tokens], seq=request.seq, salt=request.spec.salt, **how)
        except Exception as error:  # for example, an index that could not be built; no caller waits for the prompt
            _log.info("a prompt that is given up is not kept: %s", error)

    def _release(self, request: Request, *, later: bool = True) -> None:
        """Take a request out of the batch. Its slot is free at once, or when the device has run all of its launched steps.

        later: drop its state after coming launches.
        """
        decoded, self._decoding[request.seq] = self._decoding[request.seq] is request, None
        self._joined.remove(request)
        if decoded and request.checked:
            self._keep(request, 0)
        elif decoded:  # its first token is unread
            with suppress(Exception):
                self._check_prompt(request)
        if 0 < request.prefilled < request.prompt:
            expect(self.cache.kv.allocated, self.cache.kv.streams, request.seq, 0)
        self._indexing.pop(request, None)
        if later and request.unread:  # a step that was launched before it ended
            self.cache.kv.pause(request.seq)
        else:
            self._free(request, later=later)

    def _free(self, request: Request, *, later: bool = True) -> None:
        """Empty the slot of a request that has left the batch."""
        self._seqs[request.seq] = None
        self._empty(request.seq, later=later)
