"""Stream answers to one prompt, or to several with a common prefix."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvthaw.cache.index_api import Method
from kvthaw.engine.decode import generate
from kvthaw.engine.generation_config import stop_tokens
from kvthaw.engine.hf import Cache, PreTrainedModel
from kvthaw.engine.prefill import prefill
from kvthaw.engine.sampling import GREEDY, Sampling
from kvthaw.engine.text import Detokenizer, common

Progress = Callable[[int, int], None]
"""Called with the prefilled tokens of a prompt, and the prompt's tokens."""


class Answer:
    """The answer from a cache of one row. Iterate it once: it yields pieces of text as tokens come.

    logits [V]: after the prompt.
    prompt: the prompt's tokens, for penalties.
    after: tokens whose text the answer continues; without them its text is tokenized as a beginning.
    stops: tokens that end it; None: as the model and the tokenizer say.
    sampling: max_tokens None means 128.
    text, tokens: so far.
    times: when each token came, by `time.perf_counter`.
    finish: "stop" for a stop token or string, "length", or "interrupted" if the caller ended the iteration.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        cache: Cache,
        logits: Tensor,
        *,
        sampling: Sampling = GREEDY,
        prompt: Sequence[int] = (),
        after: Sequence[int] = (),
        stops: frozenset[int] | None = None,
    ) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.finish = "interrupted"
        self._out = Detokenizer(tokenizer, sampling.stop, after=after)
        limit = 128 if sampling.max_tokens is None else sampling.max_tokens
        stops = stop_tokens(model, tokenizer) if stops is None else stops
        self._coming = generate(model, cache, logits, limit=limit, stops=stops, sampling=sampling, prompt=prompt)

    @property
    def text(self) -> str:
        return self._out.text

    def __iter__(self) -> Generator[str, None, None]:
        try:
            for token in self._tokens():
                self.times.append(time.perf_counter())
                self.tokens.append(token)
                yield self._out.push(token)
                if self._out.stopped_by is not None:
                    self.finish = "stop"
                    break
            yield self._out.finish()
        finally:
            self._out.finish()

    def _tokens(self) -> Iterator[int]:
        self.finish = yield from self._coming

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the answer. The cache then holds tokens of that string."""
        return self._out.stopped_by is not None

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds of a token after the first; None without any."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1) if len(self.times) > 1 else None


def shared_tokens(parts: Sequence[tuple[list[int], list[int]]]) -> list[int]:
    """Return the tokens that the contexts of several prompts begin with; each prompt is a context and a question."""
    shared = parts[0][0]
    for before, _ in parts[1:]:
        shared = shared[: common(shared, before)]
    return shared


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts with a common prefix, which is prefilled once. Each prompt continues from a fork of its cache.

    If the model has a state that cannot be continued, each prompt is prefilled whole.

    cache: a cache under the method, empty or with the first `taken` tokens.
    shared: the common prefix.
    chunk: as for prefill().
    """

    model: PreTrainedModel
    cache: Cache
    method: str | Method
    prompts: Sequence[list[int]]
    shared: Sequence[int]
    taken: int = 0
    chunk: int | None = None

    def read(self, progress: Progress) -> Tensor:
        """Prefill and index the common prefix. Returns the logits after it, empty if each prompt is prefilled whole."""
        if self.cache.prefills_whole or not self.shared:
            return torch.empty(0)
        return self._read(self.cache, self.shared, self.taken, progress)

    def each(self, after: Tensor, progress: Progress) -> Iterator[tuple[Cache, Tensor, int]]:
        """Yield for each prompt its cache, the logits after it, and how many of its tokens had been there.

        after: what read() returned.
        """
        for number, ids in enumerate(self.prompts, 1):
            if self.cache.prefills_whole:
                self.cache.reset()
                yield self.cache, self._read(self.cache, ids, 0, progress), 0
                continue
            cache = self.cache if number == len(self.prompts) else self.cache.fork(self.method)
            held = len(self.shared)
            logits = after if held == len(ids) else self._read(cache, ids, held, progress)
            yield cache, logits, self.taken if number == 1 else held

    def _read(self, cache: Cache, ids: Sequence[int], taken: int, progress: Progress) -> Tensor:
        show = lambda done, _: progress(taken + done, len(ids))  # noqa: E731
        logits = prefill(self.model, cache, ids[taken:], chunk=self.chunk, progress=show)
        cache.wait()
        return logits
