"""Prefill prompts: once with full attention for all variants, or once for each variant."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvthaw.engine.hf import Cache, PreTrainedModel
from kvthaw.engine.hf.kv_dir import KvDir
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
    full: full attention's cache of the same tokens, or None.
    seconds: duration of each prompt's prefill.
    """

    variant: Variant
    make: Callable[[], Cache]
    logits: Tensor
    full: Cache | None
    seconds: list[float]


@dataclass(frozen=True, slots=True)
class Prefills:
    """How to prefill prompts.

    full: True prefills once with full attention, and every variant forks that cache. False prefills each variant's own
        cache in chunks, so that the device never holds a prompt's whole KV.
    kv_dir: folder of saved prompts' KV.
    """

    model: PreTrainedModel
    full: bool = True
    kv_dir: KvDir | None = None

    def of(self, variants: Sequence[Variant], prompts: Sequence[Sequence[int]], tell: Tell) -> Iterator[Prefilled]:
        """Yield the prompts under one variant after the other. A cache is gone when the next one comes."""
        if not self.full:
            for variant in variants:
                cache = Cache(self.model, variant.method, **variant.limits)
                logits, seconds = self._fill([cache], prompts, tell, f"{variant}: prefill")
                tell(0, 0, str(variant))
                yield Prefilled(variant, partial(_waited, cache), logits, None, seconds)
                cache.layers.clear()
            return
        bases = [whole(self.model, variants) for _ in prompts]
        logits, seconds = self._fill(bases, prompts, tell, "prefill")
        base = joined(self.model, bases)
        with Forks(base) as forks:
            for variant in variants:
                tell(0, 0, str(variant))
                make = forks.fork if len(prompts) > 1 else partial(fork, base)  # a single one is timed
                yield Prefilled(variant, partial(make, variant), logits, base, seconds)

    def _fill(
        self, caches: Sequence[Cache], prompts: Sequence[Sequence[int]], tell: Tell, doing: str
    ) -> tuple[Tensor, list[float]]:
        """Prefill each prompt into its cache. Returns the logits after the prompts and the seconds of each."""
        total, before = sum(map(len, prompts)), 0
        logits, seconds = [], []
        for cache, prompt in zip(caches, prompts, strict=True):
            start = now(self.model.device)
            kept = 0 if self.kv_dir is None else self.kv_dir.fill(cache, prompt)

            def show(done: int, _: int, before: int = before + kept) -> None:
                tell(before + done, total, doing)

            logits.append(prefill(self.model, cache, prompt[kept:], progress=show))
            seconds.append(now(self.model.device) - start)
            if self.kv_dir is not None:
                self.kv_dir.keep(cache, prompt, kept)
            before += len(prompt)
        return torch.stack(logits), seconds


def _waited(cache: Cache) -> Cache:
    cache.wait()
    return cache
