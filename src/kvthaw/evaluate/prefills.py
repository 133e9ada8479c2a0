"""Prefill prompts once with full attention, and fork that for all variants."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from kvthaw.engine.hf import Cache, PreTrainedModel
from kvthaw.engine.prefill import prefill
from kvthaw.evaluate.machine import now
from kvthaw.evaluate.rows import Forks, joined
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
