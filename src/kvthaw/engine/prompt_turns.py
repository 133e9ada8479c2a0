"""Which prompt a scheduler's step prefills next, and how much of it."""

from __future__ import annotations

from kvthaw.engine.batch import Batch
from kvthaw.engine.chunk_lengths import YIELDS, ChunkLengths, work
from kvthaw.engine.fair_share import FairQueue
from kvthaw.engine.request import Request

TOGETHER = 2
"""Whole prompts that share a forward on a GPU may have this many times the step's tokens. The host then launches half the kernels
per token."""
OUTPUT = 2.0
"""Prompt tokens whose service equals an output token's, as in Sheng et al. (2024)."""


class PromptTurns:
    """The prompts of a batch in the order in which they get chunks; see `Scheduler`.

    step_tokens: about the tokens of a step, at the start of a prompt.
    short: prompts of at most this many tokens are short.
    ended: priorities and clients of the requests that ended in the latest step.
    """

    def __init__(self, batch: Batch, queue: FairQueue, lengths: ChunkLengths) -> None:
        self._batch, self._queue, self._lengths = batch, queue, lengths
        self.step_tokens, self._on_gpu = lengths.step, lengths.alone is None
        self.short = lengths.step if lengths.alone is None else lengths.alone
        self.margin = lengths.step // YIELDS
        self.ended: list[tuple[int, str]] = []
        self._since = 0  # steps since the last chunk of a client that yields
        self._shortest = False  # whether the shortest prompt is next

    @property
    def prefilling(self) -> list[Request]:
        """Requests that have a slot but do not decode yet, in their order."""
        return sorted(self._batch.prefilling, key=self._queue.order)

    def next(self) -> Request | None:
        """Return the next prompt: of the client with the least service, alternately the earliest and the one with the fewest
        tokens left."""
        prompts = [one for one in self.prefilling if one.prefilled < one.prompt]
        if not prompts:
            return None
        shortest, self._shortest = self._shortest, not self._shortest
        own = [one for one in prompts if one.spec.client == prompts[0].spec.client]
        return min(own, key=lambda one: one.prompt - one.prefilled) if shortest else own[0]

    def begin(self, request: Request | None, decoded: int) -> tuple[Request | None, float]:
        """Begin a step. Returns the prompt that gets a chunk in it, and the tokens that the step has for prompts.

        request: as next() returned it. On a CPU it may have to wait.
        decoded: number of tokens that the step decodes.
        """
        behind = self._behind(request) if request is not None else set[str]()
        self._since += 1
        if request is not None and behind and not self._on_gpu:
            tokens = min(self.chunk(request, decoded) or 0, request.prompt - request.prefilled)
            if decoded and self._since < min(YIELDS * len(behind), tokens / OUTPUT):
                request = None
            else:
                self._since = 0
        return request, self.step_tokens / (YIELDS if behind else 1)

    def chunk(self, request: Request, decoded: int) -> int | None:
        """Return the length of the next chunk of a prompt; None: the batch's chunk.

        decoded: number of tokens that the step decodes.
        """
        return self._lengths.next(request, decoded, yields=bool(self._behind(request)))

    def group(self, request: Request, tokens: float) -> list[Request]:
        """Return the request, and the requests whose whole prompts share its forward: `tokens` tokens in all, or itself."""
        prompts = self._batch.prompts
        if self._on_gpu and tokens == self.step_tokens:  # it is the first prompt of the step
            tokens *= TOGETHER
        group, left = [request], tokens - request.prompt
        if left < 0 or not prompts.shares(request):
            return group
        for one in self.prefilling:
            if one is not request and one.prompt <= left and prompts.shares(one):
                group.append(one)
                left -= one.prompt
        return group[:1] if prompts.replays_all(group) else group

    def fitting(self, tokens: float) -> Request | None:
        """Return the first prompt whose rest takes no longer than `tokens` tokens at the start of a prompt."""
        for one in self.prefilling:
            waits = not self._on_gpu and self._behind(one)
            if 0 < (one.prompt - one.prefilled) * work(one.prefilled) <= tokens and not waits:
                return one
        return None

    def _behind(self, request: Request) -> set[str]:
        """Return the clients for which a prompt gets smaller chunks. They decode, or did until the step before and may soon come
        back. They have had less service, by more than the margin, and no higher priority number."""
        had, (priority, _) = self._queue.share.had, self._queue.rank(request)
        others = [(self._queue.rank(one)[0], one.spec.client) for one in self._batch.decoding] + self.ended
        least = had(request.spec.client) - self.margin
        return {client for rank, client in others if client != request.spec.client and rank <= priority and had(client) < least}
