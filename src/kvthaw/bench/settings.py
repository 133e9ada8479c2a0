"""What a line of the decode benchmark depends on, and what one can ask for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, ClassVar, TypeVar

from kvthaw.cache.index_api import Method
from kvthaw.cache.plan import Settings
from kvthaw.config import CacheConfig
from kvthaw.engine.graph_runner import needs_host
from kvthaw.errors import ConfigError, at_least, one_of
from kvthaw.evaluate.describe import describe
from kvthaw.evaluate.results import Record
from kvthaw.evaluate.variant import OWN, Variant
from kvthaw.methods import resolve
from kvthaw.methods.options import take

HF = ("hf-dynamic", "hf-offloaded")
"""transformers' own caches with sdpa attention: DynamicCache, and the same with offloading=True."""
STEPS = ("eager", "captured")
"""Ways to take a step: the model's Python, and the CUDA graphs of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSetting:
    """Settings that a record depends on, besides the code.

    shape: the model's name.
    method: a name in METHODS, with options ("clusterkv:keep=2"), or one of HF.
    steps: one of STEPS.
    budget, retrieved, dense_layers: as for `kvthaw.Cache`.
    device: the GPU's name, or the CPU's kind.
    """

    shape: str
    method: str
    steps: str
    length: int
    batch: int
    budget: int | float | None
    retrieved: int | float | None
    dense_layers: int | None
    new_tokens: int
    seed: int
    device: str

    ways: ClassVar[tuple[str, ...]] = STEPS

    def __post_init__(self) -> None:
        one_of(self.ways, steps=self.steps)
        at_least(2, length=self.length, new_tokens=self.new_tokens)
        at_least(1, batch=self.batch)
        if not self.hf:
            Settings.of(self.resolved(), self.config)  # refuse bad ones now

    @property
    def hf(self) -> bool:
        """Whether transformers' own cache serves it."""
        return self.method in HF

    def resolved(self) -> Method:
        """Return the method, new at every call."""
        return resolve(self.method)

    @property
    def config(self) -> CacheConfig:
        """Settings of its `kvthaw.Cache`."""
        return CacheConfig.split(asdict(self))[0]

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dict, for a record."""
        return asdict(self)

    def __str__(self) -> str:
        words = [self.method, f"{self.length:,}" + (f" x {self.batch}" if self.batch > 1 else ""), self.steps]
        for name in ("budget", "retrieved"):
            if getattr(self, name) is not None:
                words.append(f"{name} {getattr(self, name)}")
        return ", ".join(words)


def possible(setting: DecodeSetting, cuda: bool) -> bool:
    """Return whether the device can take such steps. Captured ones need a GPU, no hooks between the model's layers, and a method
    that decides on the device or on the host alone."""
    if setting.steps == "eager":
        return cuda or setting.method != "hf-offloaded"
    if setting.hf or not cuda:
        return False
    method = setting.resolved()
    if method.prefetches or method.index is None:
        return not method.prefetches
    about = described(setting.method)
    return needs_host(method, safe=about["graph_safe"] or about["decides"] == "host") is None


@cache
def described(method: str) -> dict[str, Any]:
    """Return what `kvthaw.evaluate.describe` finds of a method with its options."""
    return describe(resolve(method))


OPTIONS = OWN | {"new_tokens": int}
"""Options behind a method's name that are a setting's, by type."""


def values(written: str, options: dict[str, Any] = OPTIONS, **wanted: Any) -> dict[str, Any]:
    """Return the fields of a setting from a method name with options.

    `options` override the wanted values. Fields that a method does not use are None.
    """
    method, given = take(written, options)
    fields: dict[str, Any] = {**wanted, **given}
    if fields["retrieved"] is not None and ("retrieved" in given or "budget" not in given):
        fields["budget"] = given.get("budget")
    elif "budget" in given:
        fields["retrieved"] = None
    name = written.partition(":")[0]
    found = None if name in HF else resolve(method)
    if name in HF and name != written:
        raise ConfigError(f"method is {written!r}; {name} takes no options")
    if found is None or found.dense:
        fields |= {"budget": None, "retrieved": None, "dense_layers": None}
    elif found.index is None:
        fields |= {"retrieved": None, "budget": 256 if fields["budget"] is None else fields["budget"]}
    return {"method": method, **fields}


def caches(methods: Iterable[str], **wanted: Any) -> list[tuple[str, CacheConfig]]:
    """Return the methods with the settings of their `kvthaw.Cache`, without transformers' own caches.

    methods, wanted: as for `values`.
    """
    every = [values(written, **wanted) for written in methods]
    return [(one["method"], CacheConfig.split(one)[0]) for one in every if one["method"] not in HF]


S = TypeVar("S", bound=DecodeSetting)


def groups(grid: Sequence[S]) -> Iterator[list[S]]:
    """Return the settings of a grid that one cache can serve, in order; repeats once."""
    found: dict[S, list[S]] = {}
    for one in dict.fromkeys(grid):
        found.setdefault(replace(one, steps=STEPS[0]), []).append(one)
    yield from found.values()


def label(record: Record) -> str:
    """Return the label of a timed method with its requested budget."""
    asked, hits = record.setting, record.setting.get("hits")
    limit = Variant(asked["method"], asked["budget"], asked["retrieved"]).limit
    return ", ".join(filter(None, [asked["method"], limit, None if hits is None else f"{hits:.0%} hits"]))
