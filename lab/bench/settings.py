"""Settings of models with random weights, and of caches that no prompt filled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvthaw.bench.settings import HF, OPTIONS, STEPS, DecodeSetting, values
from kvthaw.bench.shapes import SHAPES
from kvthaw.errors import ConfigError, one_of
from kvthaw.methods import resolve

PROMPTS = ("run", "once", "filled", "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeSetting(DecodeSetting):
    """A setting of one of SHAPES.

    prompt: "run" prefills random tokens after a cold run of the same. "once" skips the cold run, so only step times are
        warm. "filled" starts with a cache of random keys and values, "text" with KV of a model that read a book.
    hits: the share in [0, 1) of rows that adjacent steps have in common. None: the index selects rows.
    shared: the layers of a cache that was not prefilled share their rows on the host.
    """

    prompt: str
    hits: float | None
    shared: bool
    ways: ClassVar[tuple[str, ...]] = (*STEPS, "compiled")
    """With what earlier lines may have: steps by torch.compile, which kvthaw no longer takes."""

    def __post_init__(self) -> None:
        one_of(PROMPTS, prompt=self.prompt)
        one_of(SHAPES, shape=self.shape)
        if self.hits is not None and not 0 <= self.hits < 1:
            raise ConfigError(f"hits is {self.hits}; it must be at least 0 and below 1")
        if self.shared and self.prompt in ("run", "once"):
            raise ConfigError(f"shared goes with prompt='filled' or 'text'; prompt is {self.prompt!r}")
        if self.hits is not None and self.prompt == "text":
            raise ConfigError(f"hits is {self.hits}; with prompt='text' the text says which rows are found")
        DecodeSetting.__post_init__(self)

    @property
    def dense(self) -> bool:
        """Whether every layer keeps all of its KV on the device."""
        return self.method == HF[0] or (not self.hf and self.resolved().dense)

    def __str__(self) -> str:
        return DecodeSetting.__str__(self) + ("" if self.hits is None else f", hits {self.hits}")


def grid(
    methods: Sequence[str], lengths: Sequence[int], batches: Sequence[int], steps: Sequence[str], **wanted: Any
) -> list[ShapeSetting]:
    """Return a setting for every combination, grouped by cache. Raises ConfigError for an impossible one."""
    return [
        setting(method, steps=way, length=length, batch=batch, **wanted)
        for length in lengths
        for batch in batches
        for method in methods
        for way in steps
    ]


def setting(written: str, **wanted: Any) -> ShapeSetting:
    """Return a setting of a method with options behind colons, `hits` among them; see `values`."""
    fields = values(written, OPTIONS | {"hits": float}, **{"hits": None, "prompt": "run", "shared": False, **wanted})
    one_of(STEPS, steps=fields["steps"])
    found = None if fields["method"] in HF else resolve(fields["method"])
    if found is None or found.dense:
        fields |= {"hits": None, "shared": False}
    elif found.index is None:
        fields["hits"] = None
    return ShapeSetting(**fields)
