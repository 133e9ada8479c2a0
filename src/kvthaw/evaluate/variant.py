"""Ways to attend that are run side by side."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvthaw.cache.index_api import Method
from kvthaw.engine.hf import Cache, PreTrainedModel
from kvthaw.methods import resolve
from kvthaw.methods.options import digest


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to attend. dense_layers None: what `kvthaw.Cache` takes for the model."""

    method: str
    budget: int | float | None = None
    retrieved: int | None = None
    dense_layers: int | None = None


FULL = Variant("full")


def complete(model: PreTrainedModel, variant: Variant) -> Variant:
    """Return the variant with nothing left open. Raises ConfigError for settings that no cache of the model would take."""
    if resolve(variant.method).dense:
        return FULL
    cache = Cache(model, variant.method, budget=variant.budget, retrieved=variant.retrieved, dense_layers=variant.dense_layers)
    budget = 256 if variant.budget is None and variant.retrieved is None else variant.budget
    return replace(variant, budget=budget, dense_layers=cache.settings.dense_layers)


def whole(model: PreTrainedModel, variants: Iterable[Variant], seed: int = 0) -> Cache:
    """An empty cache of full attention whose prompts these variants may fork."""
    queries = [resolve(variant.method).prompt_queries for variant in variants]
    return Cache(model, resolve("full", queries=None) if None in queries else "full", seed=seed)


def setting_of(variant: Variant) -> dict[str, Any]:
    """Return the fields of a setting that say how a complete variant attends."""
    return {**asdict(variant), "dense_layers": variant.dense_layers or 0, "options": digest(resolve(variant.method))}


def fork(base: Cache, variant: Variant, method: Method | None = None) -> Cache:
    """Return a cache's tokens under a variant, offloaded and indexed. method: the variant's, if it has been made already."""
    chosen = method or resolve(variant.method)
    limits = {} if chosen.dense else {"budget": variant.budget, "retrieved": variant.retrieved}
    dense = {} if variant.dense_layers is None else {"dense_layers": variant.dense_layers}
    cache = base.fork(chosen, **dense, **limits)
    cache.wait()
    return cache
