"""The decode benchmark on models with random weights, whose logits are checked before a time is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvthaw.bench.decode import Bench, free
from kvthaw.bench.steps import attention
from kvthaw.evaluate.results import Record
from lab.bench.card import provenance
from lab.bench.check import Checks
from lab.bench.settings import ShapeSetting
from lab.bench.shapes import build, random_ids, random_tokens


class ShapeBench(Bench[ShapeSetting]):
    """Measure settings on one model after another. Each model is built once."""

    checks: Callable[..., Callable[[ShapeSetting], None]] = Checks
    check: Callable[[ShapeSetting], None]
    _shape: tuple[str, int] | None = None

    def __init__(self, *given: Any, commit: str | None = None, **how: Any) -> None:
        super().__init__(*given, **how)
        self.about = provenance(commit)

    @torch.no_grad()
    def _measure(self, group: list[ShapeSetting]) -> Iterator[Record]:
        self.prepare(group[0].shape, group[0].seed)
        with attention(self.model, self.attends):
            for one in group:
                self.check(one)
        yield from super()._measure(group)  # which sets the attention function again: the checks' caches installed kvthaw's

    def prepare(self, shape: str, seed: int = 0) -> None:
        """Load the model of a shape, unless it is loaded."""
        if self._shape == (shape, seed):
            return
        if self._shape is not None:
            del self.model, self.check
            free()
        self.model = build(shape, self.device, seed=seed, tp=self.tp)
        self.check = self.checks(self.model)
        self._shape = shape, seed

    def runs(self, one: ShapeSetting) -> Sequence[str]:
        """Return the prefixes of a cold run alone with prompt "once"."""
        return ("cold_",) if one.prompt == "once" else super().runs(one)

    def prompt(self, one: ShapeSetting) -> Tensor:
        return random_ids(self.model, one.batch, one.length, one.seed + one.length)

    def tokens(self, one: ShapeSetting) -> Iterator[Tensor]:
        return random_tokens(self.model, one.batch, one.seed)
