"""Prefills of the laboratory: with prompts' KV kept in a folder, and without full attention; and a part of the work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from kvthaw.engine.hf import Cache, PreTrainedModel
from kvthaw.errors import ConfigError
from kvthaw.evaluate.prefills import Prefilled, Prefills, Tell
from kvthaw.evaluate.variant import Variant
from lab.evaluate.kv_dir import KvDir

T = TypeVar("T")
Shard = tuple[int, int]
"""(i, n): every n-th piece of the work, from the i-th on."""


def part(pieces: Sequence[T], shard: Shard) -> list[T]:
    """Return a shard's pieces."""
    return list(pieces[shard[0] - 1 :: shard[1]])


class KeptPrefills(Prefills):
    """Prefills that load the longest prefix of a prompt from a folder, and save what the folder lacks."""

    def __init__(self, model: PreTrainedModel, folder: KvDir | None) -> None:
        super().__init__(model)
        self.folder = folder

    def prefill(self, cache: Cache, prompt: Sequence[int], show: Callable[[int], None]) -> Tensor:
        if self.folder is None:
            return super().prefill(cache, prompt, show)
        kept = self.folder.fill(cache, prompt)
        logits = super().prefill(cache, prompt[kept:], lambda done: show(kept + done))
        self.folder.keep(cache, prompt, kept)
        return logits


class OwnPrefills(KeptPrefills):
    """Prefills of each variant's own cache in chunks, so that the device never holds a prompt's whole KV."""

    full: ClassVar = False

    def of(self, variants: Sequence[Variant], prompts: Sequence[Sequence[int]], tell: Tell) -> Iterator[Prefilled]:
        for variant in variants:
            cache = Cache(self.model, variant.method, **variant.limits)
            logits, seconds = self.fill([cache], prompts, tell, f"{variant}: prefill")
            tell(0, 0, str(variant))
            yield Prefilled(variant, partial(_waited, cache), logits, None, seconds)
            cache.layers.clear()


def _waited(cache: Cache) -> Cache:
    cache.wait()
    return cache


def prefilled(
    model: PreTrainedModel, *, full: bool = True, kv_dir: KvDir | None = None, batch: int | None = None
) -> dict[str, Any]:
    """Return an Evaluator's settings. Raises ConfigError for samples that share their steps without full attention.

    full: compare with full attention; without it samples are run one by one.
    batch: as for Evaluator, if given.
    """
    if full:
        return {"prefills": KeptPrefills(model, kv_dir), **({} if batch is None else {"batch": batch})}
    if batch not in (None, 1):
        raise ConfigError(f"batch is {batch}; without full attention samples are run one by one, so it must be 1")
    return {"prefills": OwnPrefills(model, kv_dir), "batch": 1}
