"""The slots of a running batch: how requests get them and lose them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

import torch

from kvthaw.cache.passes import wait_indexed
from kvthaw.cache.step import Moves
from kvthaw.engine.batch_prompts import BatchPrompts
from kvthaw.engine.hf import PreTrainedModel
from kvthaw.engine.hf.batch_cache import BatchCache
from kvthaw.engine.request import Request
from kvthaw.engine.steps import Steps
from kvthaw.errors import CacheError, HostMemoryError

_log = logging.getLogger(__name__)
_MOVES, _SPARE = 32, 8
"""Most requests that move to other slots before a step, 0.1 ms of the host each. One in _SPARE of the slots must stay free, so
that none moves back and forth as requests come and go."""


def consecutive(requests: Sequence[Request]) -> list[list[Request]]:
    """Split requests, sorted by slot, into runs of consecutive slots."""
    runs = list[list[Request]]()
    for request in requests:
        if not runs or request.seq != runs[-1][-1].seq + 1:
            runs.append([])
        runs[-1].append(request)
    return runs


class Slots:
    """Which request has which slot, and the state of each in cache and sampler.

    held: the request of each slot, also an ended one that a launched step still computes; None for a free slot.
    """

    def __init__(self, model: PreTrainedModel, cache: BatchCache, prompts: BatchPrompts, steps: Steps) -> None:
        self._model, self._cache, self._prompts, self._steps = model, cache, prompts, steps
        self.held: list[Request | None] = [None] * cache.kv.sequences.count
        self._arrived = 0

    def holds(self, request: Request) -> bool:
        """Return whether a request has a slot and has not ended."""
        return request.finished is None and request in self.held

    def place(self, request: Request) -> None:
        """Put a request into the first free slot. A request that was swapped out decodes again, or restarts if it cannot."""
        kv = self._cache.kv
        seq = self.held.index(None)
        wait_indexed(kv.offloaded)  # not for the step under way: the host proceeds to the prompt meanwhile
        kv.reuse(seq)
        kv.sequences.ends[seq] = request.prompt + request.spec.limit
        request.place(seq, self._model)
        self.held[seq], request.arrived, self._arrived = request, self._arrived, self._arrived + 1
        swapped, request.swapped = request.swapped, None
        if swapped is None:
            return
        try:
            self._cache.swap_in(seq, swapped)
            self._steps.join(request, request.tokens)
            request.decodes = True
        except Exception as error:
            _log.info("a request that was preempted begins again: %s", error)
            self.begin_again(request)

    def close_up(self) -> None:
        """Move requests from the upper half of the slots that steps compute to the lower half, if all requests fit there.

        A step computes a power of two of slots.
        """
        kv, taken = self._cache.kv, [seq for seq, one in enumerate(self.held) if one is not None]
        half = 1 << max(taken, default=0).bit_length() >> 1
        if self._cache.states or not kv.moves or len(taken) > half - half // _SPARE:
            return
        free = [seq for seq in range(half) if self.held[seq] is None]
        moving = [seq for seq in reversed(taken) if seq >= half and self._moves(seq)]
        moves = Moves(dict(zip(moving[:_MOVES], free, strict=False)))
        if moves.slots:
            kv.move(moves)
            self._steps.move(moves)
        for seq, to in moves.slots.items():
            request, self.held[seq] = self.held[seq], None
            if request is not None:
                self.held[to], request.seq = request, to

    def _moves(self, seq: int) -> bool:
        """Return whether the request of a slot can move: it decodes, without a grammar, and has not reached its limit."""
        request = self.held[seq]
        if request is None or seq in self._cache.kv.sequences.paused:
            return False
        return request.decodes and request.checked and request.finished is None and request.matcher is None

    def start(self, request: Request) -> None:
        """Start a request whose prompt is prefilled and indexed. It decodes once first() has sampled its first token."""
        self._cache.kv.resume(request.seq)
        self._cache.states.place(request.seq)
        self._steps.join(request)

    def first(self, requests: Sequence[Request]) -> None:
        """Sample the first tokens of requests in consecutive slots that start() was called for."""
        indexing = self._prompts.indexing
        self._steps.first(requests, torch.cat([indexing[request] for request in requests]))
        for request in requests:
            del indexing[request]
            request.decodes = True

    def check_prompt(self, request: Request) -> None:
        """Keep a prompt in the prefix cache, once it has arrived on the host. Raises CacheError if it was not finite."""
        self._cache.kv.finite.end(request.seq)
        if self._prompts.prefixes is not None or not self._cache.kv.moves:
            self._cache.wait()  # for what is to be kept, and for indexes
        request.checked = True
        written = request.prompt % self._cache.settings.block_size  # decoding writes into the last block
        self._prompts.keep(request, request.prompt - written)

    def preempt(self, request: Request, *, keep: bool) -> None:
        """Take a request's slot away, and swap its state out if possible; see `Batch.preempt`."""
        swapped = None
        self._steps.settle(request)
        if keep and not request.decodes:
            self._prompts.keep_part(request)
        elif keep and not request.unread:
            try:
                swapped = self._cache.swap_out(request.seq)
                request.decodes = False  # so that its prompt is not kept
            except (CacheError, HostMemoryError, torch.OutOfMemoryError) as error:
                _log.info("a request that is preempted begins again: %s", error)
        self.release(request, later=False)
        self._steps.drop(request)
        request.seq = -1
        if swapped is None:
            request.rewind()
        request.swapped = swapped

    def release(self, request: Request, *, later: bool = True) -> None:
        """Take a request out of the batch. Its slot is free at once, or when the device has run all of its launched steps.

        later: drop its state after coming launches.
        """
        decoded, request.decodes = request.decodes, False
        if decoded and request.checked:
            self._prompts.keep(request, request.prompt)
        elif decoded:  # its first token is unread
            with suppress(Exception):
                self.check_prompt(request)
        self._prompts.forget(request)
        if later and request.unread:  # a step that was launched before it ended
            self._cache.kv.pause(request.seq)
        else:
            self.free(request, later=later)

    def free(self, request: Request, *, later: bool = True) -> None:
        """Empty the slot of a request that has left the batch."""
        self.held[request.seq] = None
        self._empty(request.seq, later=later)

    def begin_again(self, request: Request) -> None:
        """Restart a request in its slot, which is emptied. The device runs no step of it."""
        request.decodes = False
        self._empty(request.seq, later=False)
        self._steps.drop(request)
        request.rewind()

    def _empty(self, seq: int, *, later: bool) -> None:
        self._steps.sampler.leave(seq)
        self._cache.kv.clear(seq, later=later)
        self._cache.states.clear(seq)
