"""Ways to attend that are run side by side."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvthaw.cache.index_api import Method
from kvthaw.cache.plan import Settings
from kvthaw.config import CacheConfig
from kvthaw.errors import ConfigError
from kvthaw.method_names import split_names
from kvthaw.methods import resolve
from kvthaw.methods.options import digest, take
from kvthaw.regions import BUDGET

if TYPE_CHECKING:
    from kvthaw.engine.hf import Cache, PreTrainedModel


@dataclass(frozen=True)
class Variant:
    """One way to attend. dense_layers None: what `kvthaw.Cache` takes for the model."""

    method: str
    budget: int | float | None = None
    retrieved: int | float | None = None
    dense_layers: int | None = None

    @cached_property
    def resolved(self) -> Method:
        """The method, made once. Raises ConfigError for a name or an option that there is not."""
        return resolve(self.method)

    @property
    def limits(self) -> dict[str, Any]:
        """Settings of its `kvthaw.Cache`."""
        dense = {} if self.dense_layers is None else {"dense_layers": self.dense_layers}
        return {"budget": self.budget, "retrieved": self.retrieved} | dense

    @property
    def cache(self) -> tuple[Method, CacheConfig]:
        """The method and the settings of its `kvthaw.Cache`."""
        return self.resolved, CacheConfig(**self.limits)

    @staticmethod
    def of(fields: Mapping[str, Any]) -> Variant:
        """Return the variant of a setting, or of a summary, which may hold the requested value next to a mean."""
        retrieved = fields.get("asked_retrieved", fields["retrieved"])
        return Variant(fields["method"], fields["budget"], retrieved, fields["dense_layers"])

    @property
    def limit(self) -> str | None:
        """The budget, or how many rows are retrieved."""
        return (
            f"{self.retrieved} retrieved" if self.retrieved is not None else None if self.budget is None else str(self.budget)
        )

    @property
    def label(self) -> str:
        """The method with all that limits it, in a few words."""
        limit = self.limit if self.retrieved is not None or self.budget is None else f"budget {self.budget}"
        dense = None if self.dense_layers is None else f"{self.dense_layers} dense"
        return ", ".join(filter(None, [self.method, limit, dense])) if self.method != "full" else self.method

    def __str__(self) -> str:
        return " ".join(filter(None, [self.method, self.limit]))


FULL = Variant("full")
OWN = {"budget": int | float, "retrieved": int | float, "dense_layers": int}
"""Options of a variant that are written among its method's options."""


def read_variant(
    written: str, budget: int | float | None = None, retrieved: int | float | None = None, dense_layers: int | None = None
) -> Variant:
    """Return a method with options under a limit. A budget, retrieved or dense_layers among the options, as in
    "pariskv:budget=0.2", comes instead of those given."""
    method, own = take(written, OWN)
    common = {} if "budget" in own or "retrieved" in own else {"budget": budget, "retrieved": retrieved}
    return Variant(method, **{"dense_layers": dense_layers, **common, **own})


def read_variants(
    methods: str | Iterable[str],
    budgets: Sequence[int | float] = (),
    retrieved: Sequence[int] = (),
    dense_layers: Sequence[int] = (),
) -> list[Variant]:
    """Return every method under every budget, number of rows and number of dense layers; full attention once.

    methods: names with options, separated by commas or one by one; see read_variant. Raises ConfigError, without a model, for a
    name, an option or a limit that no cache would take."""
    limits: list[tuple[int | float | None, int | None]] = [(one, None) for one in budgets]
    limits += [(None, one) for one in retrieved]
    found: dict[Variant, None] = {}
    for written in itertools.chain.from_iterable(map(split_names, [methods] if isinstance(methods, str) else methods)):
        own = read_variant(written)
        dense = own.resolved.dense
        if dense and own != Variant(own.method):
            raise ConfigError(f"method is {written!r}; {own.resolved.name} attends to everything, under no limit")
        for limit, kept in itertools.product(limits or [(None, None)], dense_layers or (None,)):
            variant = own if dense else read_variant(written, *limit, kept)
            Settings.of(own.resolved, variant.cache[1])
            found[variant] = None
    return list(found)


def complete(model: PreTrainedModel, variant: Variant) -> Variant:
    """Return the variant with nothing left open. Raises ConfigError for settings that no cache of the model would take."""
    from kvthaw.engine.hf import Cache  # imports transformers, for which no wrong option need wait

    if variant.resolved.dense:
        return FULL
    cache = Cache(model, variant.resolved, **variant.limits)
    budget = BUDGET if variant.budget is None and variant.retrieved is None else variant.budget
    return replace(variant, budget=budget, dense_layers=cache.settings.dense_layers)


def whole(model: PreTrainedModel, variants: Iterable[Variant], seed: int = 0) -> Cache:
    """An empty cache of full attention whose prompts these variants may fork."""
    from kvthaw.engine.hf import Cache

    queries = [variant.resolved.prompt_queries for variant in variants]
    return Cache(model, resolve("full", queries=None) if None in queries else "full", seed=seed)


def setting_of(variant: Variant) -> dict[str, Any]:
    """Return the fields of a setting that describe a complete variant."""
    return {**asdict(variant), "dense_layers": variant.dense_layers or 0, "options": digest(variant.resolved)}


def fork(base: Cache, variant: Variant, method: Method | None = None, config: CacheConfig | None = None) -> Cache:
    """Return a cache's tokens under a variant, offloaded and indexed.

    method: the base's, whose indexes are copied; None: the variant's.
    config: further settings of the cache. Full attention takes none.
    """
    chosen, limits = method or variant.resolved, variant.limits
    if config is not None:
        limits = {"config": replace(config, **limits)}
    cache = base.fork(chosen, **({} if chosen.dense else limits))
    cache.wait()
    return cache


def check_retrieves(variant: Variant) -> None:
    """Raise ConfigError for a method that retrieves nothing that could be shown."""
    if variant.resolved.index is None:
        raise ConfigError(f"method is {variant.method!r}, which retrieves nothing that could be shown")
