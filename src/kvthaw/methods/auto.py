"""method="auto": full attention while it is faster, then the index that is best on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvthaw.cache.index_api import Method
from kvthaw.cache.plan import Settings
from kvthaw.config import CacheConfig, Crossing
from kvthaw.formatting import human
from kvthaw.method_names import AUTO, unknown_method
from kvthaw.methods import METHODS, resolve
from kvthaw.methods.options import check, written

if TYPE_CHECKING:
    from kvthaw.cache.plan import Needs

Limits = dict[str, tuple[int, int]]
"""Bytes that a cache needs and bytes that are available, by place ("device", "host")."""


@dataclass(frozen=True, slots=True)
class Best:
    """Methods for long contexts on one kind of device, the best first, each with less device memory than the one before.

    Also the length from which the first is faster than full attention.
    """

    methods: tuple[str, ...]
    crossing: Crossing

    @property
    def method(self) -> str:
        """The best."""
        return self.methods[0]


_8B = 4096
"""Bytes of KV of a token in a layer of 8 heads of 128 dimensions in bf16. The crossings on GPUs were measured with these."""

_ON_GPU = ("thaw", "pariskv-plus", "clusterkv-plus", "icecache-digest")
BEST = {
    "NVIDIA H100": Best(_ON_GPU, Crossing(((1, 35700), (24, 6100)), _8B, "measured on an H100")),
    "NVIDIA H200": Best(_ON_GPU, Crossing(((1, 51600), (24, 7900)), _8B, "measured on an H200")),
    "cuda": Best(_ON_GPU, Crossing(((1, 51600), (24, 7900)), _8B, "an H200's, not measured on this GPU")),
    "cpu": Best(
        ("icecache-digest:remainder=64", "icecache-digest"), Crossing(((1, 8192),), 0, "measured on two cores, at one length")
    ),
}
"""By the beginning of a GPU's name, then other GPUs and the CPU. For one sequence the H200's number is thaw's; the H100's, an
earlier method's, is what thaw's would be with its memory's bandwidth. For 24 sequences the H200's is scaled from an H100's.
`python -m lab.placement` prints such lines."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A method that was chosen by its memory needs.

    reason: why it is not the fastest, if it is not.
    lacks: how it exceeds the memory, if it does.
    """

    method: Method
    needs: Needs
    reason: str = ""
    lacks: str = ""


def fastest(methods: Sequence[Method], needs: Callable[[Method], Needs], limits: Callable[[Needs], Limits]) -> Chosen:
    """Choose the first of some methods that fits the memory, or else the one that exceeds it least.

    needs: returns the memory that a method needs.
    limits: returns (bytes needed, bytes available) by place, "device" and "host", without places that have no limit.
    """
    found: list[Needs] = []
    over: list[float] = []
    for method in methods:
        found.append(needs(method))
        over.append(largest_share(limits(found[-1])))
        if over[-1] <= 1:
            break
    best = over.index(min(over))
    lacks = [_lacks(methods[i].name, limits(one)) for i, one in enumerate(found)]
    return Chosen(methods[best], found[best], lacks[0] if best else "", lacks[best])


def largest_share(limits: Limits) -> float:
    """Return the largest share of any place's memory that a cache needs; above 1 it does not fit."""
    return max((need / max(1, limit) for need, limit in limits.values()), default=0.0)


def _lacks(name: str, limits: Limits) -> str:
    """Describe where a method needs more memory than is available."""
    places = limits.items()
    short = [f"{human(need)} on the {place} ({human(limit)} free)" for place, (need, limit) in places if need > limit]
    return f"{name} would need {' and '.join(short)}" if short else ""


def find(method: str | Method, device: torch.device) -> Method:
    """Return the method of a name on a device; for "auto" the fastest at long contexts."""
    return candidates(method, device)[0][0]


def candidates(method: str | Method, device: torch.device, **options: Any) -> tuple[list[Method], Crossing | None]:
    """Return the methods of a name on a device: for "auto" all that it may choose, the fastest first, and the crossing up to
    which full attention is faster."""
    name = method.partition(":")[0] if isinstance(method, str) else None
    if name is not None and name not in (AUTO, *METHODS):
        raise unknown_method(name, (AUTO, *METHODS))
    if not isinstance(method, str) or name != AUTO:
        return [resolve(method, **options)], None
    check(AUTO, dict(map(written, method.split(":")[1:])) | options)
    best = best_on(torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu")
    return [resolve(name) for name in best.methods], best.crossing


def best_on(name: str) -> Best:
    """Return the method for a GPU of a name, as torch gives it, or for "cpu"."""
    return BEST[next((known for known in BEST if name.startswith(known)), "cuda")]


def check_settings(method: str | Method, given: CacheConfig) -> None:
    """Raise ConfigError, without a model, for a name that is no method's, and for options and settings that it does not take."""
    Settings.of(find(method, torch.device("cpu")), given)
