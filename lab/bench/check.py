"""What a decode benchmark must have right before it reports a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kvthaw.bench.settings import HF
from kvthaw.bench.steps import attention, hf_cache, replayed
from kvthaw.engine.decode import decode
from kvthaw.engine.hf import Cache, DynamicCache, PreTrainedModel
from kvthaw.errors import CacheError
from kvthaw.evaluate.machine import synchronize
from lab.bench.settings import ShapeSetting
from lab.bench.shapes import random_ids

PROMPT, LENGTH = 480, 512


class Checks:
    """Compare logits with transformers' own, once per method and way to take steps, for one model.

    Tolerance: 1.5 times the difference between transformers' two attentions (sdpa and eager), because kvthaw's kernels of
    linear layers round in another order too. Rounding alone moves the logits of a deep bfloat16 model of random weights by 8 %.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.ids = random_ids(model, 1, LENGTH, seed=1)
        self._passed: set[tuple[object, ...]] = set()
        self._reference: tuple[Tensor, float] | None = None

    def __call__(self, setting: ShapeSetting) -> None:
        """Check the logits of a setting's method and steps, once each. Raises CacheError if they differ."""
        if setting.method not in HF:
            self.once((setting.method, setting.dense_layers, setting.steps), lambda: self._equals_full(setting))
        elif setting.method != HF[0] or setting.prompt != "run":
            self.once((setting.method, setting.prompt), lambda: self._same_cache(setting))

    def once(self, what: tuple[object, ...], check: Callable[[], None]) -> None:
        if what not in self._passed:
            check()
            self._passed.add(what)

    def _equals_full(self, setting: ShapeSetting) -> None:
        """With a budget above the length a method attends to everything."""
        cache = self.cache(setting, 4 * LENGTH)
        self.near(self.decode(cache, setting.steps), setting, "transformers at a budget above the length")

    def cache(self, setting: ShapeSetting, budget: int) -> Cache:
        config = replace(setting.config, budget=None if setting.dense else budget, retrieved=None)
        return Cache(self.model, setting.resolved(), config=config)

    def _same_cache(self, setting: ShapeSetting) -> None:
        cache = self.begun(setting)
        with attention(self.model, "sdpa"):
            self.near(self.decode(cache, "eager"), setting, "transformers' DynamicCache")

    def begun(self, setting: ShapeSetting) -> DynamicCache:
        """Return one of transformers' own caches, to which the prompt may still have to come."""
        return hf_cache(self.model, setting.method)

    def decode(self, cache: DynamicCache, steps: str, count: int = LENGTH - PROMPT) -> Tensor:
        """Return the logits [count, V] of tokens after the prompt, which is processed before them if the cache is empty."""
        if cache.get_seq_length() == 0:
            self.model(self.ids[:, :PROMPT], past_key_values=cache, logits_to_keep=1)
        replayed(self.model, cache, steps)
        found: list[Tensor] = []

        def choose(logits: Tensor) -> Tensor | None:
            found.append(logits.float().clone())
            synchronize(self.model.device)  # as where steps are timed; see hf_cache
            at = PROMPT + len(found) - 1
            return self.ids[:, at : at + 1] if len(found) <= count else None

        for _ in decode(self.model, cache, torch.empty(0), choose, capture=steps != "eager"):
            pass
        return torch.cat(found[1:])

    def near(self, ours: Tensor, setting: ShapeSetting, what: str, theirs: Tensor | None = None) -> None:
        if self._reference is None:
            found = []
            for name in ("sdpa", "eager"):
                with attention(self.model, name):
                    found.append(self.decode(DynamicCache(config=self.model.config), "eager"))
            self._reference = found[0], float((found[1] - found[0]).norm() / found[0].norm())
        reference, rounding = self._reference
        reference = reference if theirs is None else theirs
        error, allowed = float((ours - reference).norm() / reference.norm()), max(1.5 * rounding, 1e-4)
        why = f"1.5 times what transformers' eager attention does from its sdpa ({rounding:.4f})"
        if not error <= allowed:
            raise CacheError(
                f"{setting.method}, {setting.steps}, differs from {what} by {error:.4f} of the logits' norm, more than {why}"
            )
