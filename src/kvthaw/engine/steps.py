"""The steps of a running batch on the device, and their tokens that the host has not read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvthaw.cache.step import Moves
from kvthaw.engine.graph_runner import StaticGraphs, capturable
from kvthaw.engine.hf import PreTrainedModel
from kvthaw.engine.hf.batch_cache import BatchCache
from kvthaw.engine.hf.fused import fusing
from kvthaw.engine.logprobs import TokenLogprobs
from kvthaw.engine.request import Request
from kvthaw.engine.sampling import Sampler
from kvthaw.kernels.gpu import upload

_Read = Callable[[], tuple[list[int], list[TokenLogprobs] | None]]
"""Waits for the tokens of a launch, and returns them with their log-probabilities, by row."""
_Rows = list[tuple[int, Request, int]]
"""Of each request its row, and the index of its token in its output."""


class Steps:
    """Compute and sample the tokens of a running batch.

    The device keeps the latest token of each sequence, so that a step needs no token that the host has not read.

    capture: whether steps are captured and replayed.
    earlier: how many launches with unread tokens came before the latest step.
    """

    def __init__(self, model: PreTrainedModel, cache: BatchCache, vocabulary: int, *, capture: bool) -> None:
        seqs = cache.kv.sequences.count
        self.sampler = Sampler(seqs, vocabulary, model.device)
        self.earlier = 0
        self._cache, self._forward, self._capture = cache, fusing(model, model.forward), capture
        self._latest = torch.zeros(seqs, dtype=torch.int64, device=model.device)
        self._unread = deque[tuple[_Read, _Rows]]()  # oldest first

    def __len__(self) -> int:
        """Return how many launches have unread tokens."""
        return len(self._unread)

    def join(self, request: Request, output: Sequence[int] = ()) -> None:
        """Sample with a request's settings in its slot.

        output: tokens that it has already.
        """
        spec = request.spec
        self.sampler.join(request.seq, spec.sampling, spec.ids, spec.stop, request.matcher, output)

    def move(self, moves: Moves) -> None:
        """Move the latest tokens and the settings of sequences to free slots."""
        moves.copy(self._latest)
        for seq, to in moves.slots.items():
            self.sampler.move(seq, to)

    def first(self, requests: Sequence[Request], logits: Tensor) -> None:
        """Sample the first tokens of requests that have joined consecutive slots, from the logits [R, V] after their prompts."""
        at = upload([one.prompt for one in requests], torch.int64, self.sampler.device)
        rows = slice(requests[0].seq, requests[-1].seq + 1)
        drawn = self.sampler(logits, at, rows)
        self._latest[rows] = drawn.tokens
        self._add(drawn.fetch(), [(row, one, 0) for row, one in enumerate(requests)])

    def launch(self, step: Sequence[Request | None]) -> None:
        """Launch a step of the requests in the first slots; None for a slot without one.

        It is counted once the device has it. If this raises before, nothing is read.
        """
        rows, live = slice(0, len(step)), [one for one in step if one is not None]
        at = [(one.known, one.prompt + one.fed) if one else (0, 0) for one in step]
        ids, positions = upload(at, torch.int64, self.sampler.device)[:, :, None].unbind(1)
        if any(known < 0 for known, _ in at):
            ids = torch.where(ids < 0, self._latest[rows, None], ids)
        with torch.no_grad():
            logits = self.replay(ids, positions)[:, -1]
            drawn = self.sampler(logits, positions[:, 0] + 1, rows)
            self._latest[rows] = drawn.tokens
            read = drawn.fetch()
        self.replay.run_ahead()  # while the device runs the step
        self._add(read, [(one.seq, one, one.fed + 1) for one in live])
        for request in live:
            request.fed += 1

    def pop(self) -> list[tuple[Request, int, int, TokenLogprobs | None]]:
        """Wait for the oldest unread tokens. Returns each request, the index of its token in its output, the token, its score."""
        (read, rows), self.earlier = self._unread.popleft(), max(0, self.earlier - 1)
        tokens, scores = read()
        for _, request, _ in rows:
            request.unread -= 1
        return [(request, at, tokens[row], scores[row] if scores else None) for row, request, at in rows]

    def settle(self, request: Request | None = None) -> None:
        """Wait until the device has run all launched work.

        request: wait only if it takes part in that work; None: in any case.
        """
        if self._unread and (request is None or request.unread):
            self._unread[-1][0]()

    def drop(self, request: Request) -> None:
        """Drop unread tokens of a request that the model computes again."""
        for _, rows in self._unread if request.unread else ():
            rows[:] = [row for row in rows if row[1] is not request]
        request.unread = 0

    def _add(self, read: _Read, rows: _Rows) -> None:
        self._unread.append((read, rows))
        for _, request, _ in rows:
            request.unread += 1

    @property
    def replay(self) -> StaticGraphs:
        """The captured steps."""
        cache = self._cache
        if not isinstance(cache.replay, StaticGraphs):
            captured = self._capture and capturable(cache) is None
            cache.replay = StaticGraphs(self._forward, cache, capture=captured)
        return cache.replay
