"""Samples that share their steps: prefill each once with full attention, join them as rows of a cache, fork it for all variants."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvthaw.engine.decode import feed
from kvthaw.engine.hf import Cache, PreTrainedModel
from kvthaw.engine.hf.model import kv_bytes
from kvthaw.engine.prefill import prefill
from kvthaw.errors import ConfigError, at_least
from kvthaw.evaluate.machine import now
from kvthaw.evaluate.variant import Variant, fork, whole

Tell = Callable[[int, int, str], None]
"""Called with the number of tokens done, their total, and a description."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Prompts, a row each, under a variant.

    make: returns their cache, offloaded and indexed. logits [B, V]: after the last tokens.
    full: full attention's cache of the same tokens; None if there is none.
    seconds: duration of each prompt's prefill.
    """

    variant: Variant
    make: Callable[[], Cache]
    logits: Tensor
    full: Cache | None
    seconds: list[float]


class Prefills:
    """Prefill prompts with full attention. Every variant forks that cache."""

    full: ClassVar = True
    """Whether there is full attention to compare with."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def of(self, variants: Sequence[Variant], prompts: Sequence[Sequence[int]], tell: Tell) -> Iterator[Prefilled]:
        """Yield the prompts under one variant after the other. A cache is gone when the next one comes."""
        bases = [whole(self.model, variants) for _ in prompts]
        logits, seconds = self.fill(bases, prompts, tell, "prefill")
        base = joined(self.model, bases)
        with Forks(base) as forks:
            for variant in variants:
                tell(0, 0, str(variant))
                make = forks.fork if len(prompts) > 1 else partial(fork, base)  # a single one is timed
                yield Prefilled(variant, partial(make, variant), logits, base, seconds)

    def fill(
        self, caches: Sequence[Cache], prompts: Sequence[Sequence[int]], tell: Tell, doing: str
    ) -> tuple[Tensor, list[float]]:
        """Prefill each prompt into its cache. Returns the logits after the prompts and the seconds of each."""
        total, before = sum(map(len, prompts)), 0
        logits, seconds = [], []
        for cache, prompt in zip(caches, prompts, strict=True):
            start = now(self.model.device)

            def show(done: int, before: int = before) -> None:
                tell(before + done, total, doing)

            logits.append(self.prefill(cache, prompt, show))
            seconds.append(now(self.model.device) - start)
            before += len(prompt)
        return torch.stack(logits), seconds

    def prefill(self, cache: Cache, prompt: Sequence[int], show: Callable[[int], None]) -> Tensor:
        """Prefill a prompt into an empty cache, and return the logits [V] after it.

        show: called with the number of tokens done.
        """
        return prefill(self.model, cache, prompt, progress=lambda done, _: show(done))


MOST_ROWS = 64
"""Default for the rows of one cache."""
MOST_BYTES = 5 << 30
"""Bytes of KV that their prompts take: 26 prompts of 32k of the model that ships."""


class Rows:
    """The number of samples that a model decodes in one step.

    asked: the number; None: 64, fewer for long prompts, or 1 if the model has layers that transformers serves itself.

    Raises ConfigError for less than 1, and for more than 1 if the model takes only one.
    """

    def __init__(self, model: PreTrainedModel, asked: int | None) -> None:
        at_least(1, batch=asked)
        empty = Cache(model, "full")
        alone = len(empty.kv.layers) != len(empty.layers)
        if alone and asked is not None and asked > 1:
            raise ConfigError(
                f"batch is {asked}; {type(model).__name__} has layers that transformers serves itself, so only 1 works"
            )
        self._asked = 1 if alone else asked
        self._token_bytes = kv_bytes(model, range(len(empty.layers)))

    def at(self, length: int) -> int:
        """Return the number for prompts of `length` tokens."""
        return self._asked or max(1, min(MOST_ROWS, MOST_BYTES // (self._token_bytes * length)))


def spread(count: int, rows: int) -> list[tuple[int, int]]:
    """Divide `count` samples into the fewest spans (start, stop) of at most `rows` samples, as equal as possible."""
    parts = -(-count // rows)
    return [(count * i // parts, count * (i + 1) // parts) for i in range(parts)]


class Forks:
    """Context manager that forks a base cache for one variant after another, and clears the base on exit.

    Adjacent variants of a method with equal regions reuse one index across budgets, if the method allows it.
    """

    def __init__(self, base: Cache) -> None:
        self._base = base
        self._kept: tuple[Variant, Cache] | None = None  # a fork that takes no steps

    def fork(self, variant: Variant) -> Cache:
        """Return a cache with the base's tokens under a variant, offloaded and indexed."""
        kept = self._that_serves(variant)
        if kept is None:
            self._drop()
            kept = fork(self._base, variant)
            if not variant.resolved.any_budget:
                return kept
            self._kept = variant, kept
        return fork(kept, variant, kept.settings.method)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Clear the base and drop the last fork."""
        self._drop()
        self._base.layers.clear()  # a cache refers to itself; its rows go before the next one's come

    def _that_serves(self, variant: Variant) -> Cache | None:
        if self._kept is None:
            return None
        of, cache = self._kept
        asked = replace(cache.settings, budget=variant.budget, retrieved=variant.retrieved)
        sequences = cache.kv.sequences
        same = not sequences.divided or asked.plan(sequences.longest).regions == sequences.regions
        return cache if same and (of.method, of.dense_layers) == (variant.method, variant.dense_layers) else None

    def _drop(self) -> None:
        if self._kept is not None:
            self._kept[1].layers.clear()
            self._kept = None


def joined(model: PreTrainedModel, bases: list[Cache]) -> Cache:
    """Return one full-attention cache with the sequences of several, which are empty afterwards."""
    if len(bases) == 1:
        return bases[0]
    whole = Cache(model, bases[0].settings.method)
    for i, layer in enumerate(whole.layers):
        layer.remember_module(bases[0].layers[i].module())
    whole.kv.join([base.kv for base in bases])
    return whole


def divide(prompt: Sequence[int], tail: int) -> tuple[list[int], list[int]]:
    """Return a prompt's tokens before its last `tail`, at least one of them, and those last ones. Raises ConfigError for an empty
    prompt or a negative tail."""
    if not prompt:
        raise ConfigError("the prompt is empty")
    at_least(0, tail=tail)
    cut = max(1, len(prompt) - tail)
    return list(prompt[:cut]), list(prompt[cut:])


class Prompt:
    """A prompt whose tokens, except the last `tail`, are in a full cache. Any number of continuations start from it.

    variants: the variants that fork it.
    """

    def __init__(
        self, model: PreTrainedModel, prompt: Sequence[int], tail: int, seed: int = 0, variants: Iterable[Variant] = ()
    ) -> None:
        self.model = model
        first, self.tail = divide(prompt, tail)
        self._base = whole(model, variants, seed)
        self._logits = prefill(model, self._base, first)

    @torch.no_grad()
    def cache(self, variant: Variant) -> tuple[Cache, Tensor]:
        """Return a cache of the whole prompt under a variant, which has seen the tail token by token; the logits [V] behind it."""
        cache = fork(self._base, variant)
        return cache, self._send(cache, self._logits, self.tail)[-1]

    @torch.no_grad()
    def loglikelihood(self, variant: Variant, continuation: Sequence[int]) -> tuple[float, bool]:
        """Return the natural logarithm of a continuation's probability, and whether each of its tokens is the likeliest.

        The tokens go through the variant one by one. The prompt's last token predicts the first of them: under the budget if the
        tail has at least one token. Raises ConfigError for an empty continuation."""
        if not continuation:
            raise ConfigError("the continuation is empty")
        cache, logits = self.cache(variant)
        before = torch.stack(self._send(cache, logits, continuation[:-1]))
        scores, tokens = torch.log_softmax(before.float(), dim=-1), torch.tensor(continuation, device=before.device)
        greedy = bool((scores.argmax(dim=-1) == tokens).all())
        return float(scores.gather(1, tokens[:, None]).sum()), greedy

    def _send(self, cache: Cache, logits: Tensor, tokens: Sequence[int]) -> list[Tensor]:
        """Send tokens through a cache one by one. Returns the logits [V] before each of them and behind the last."""
        return [logits, *(after[0].clone() for after in feed(self.model, cache, tokens))]
