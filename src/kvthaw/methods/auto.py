"""method="auto": full attention up to the tokens where it is the faster way, then the index that is best on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvthaw.cache.crossing import Crossing
from kvthaw.cache.index_api import Method
from kvthaw.methods import resolve
from kvthaw.methods.options import check, written

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Best:
    """The method for long contexts on a kind of device, and from where on it is the faster way."""

    method: str
    crossing: Crossing


_8B = 4096
"""Bytes of KV of a token in a layer of 8 heads of 128 dimensions in bf16, of which the crossings on GPUs are."""

BEST = {
    "NVIDIA H100": Best("pariskv-plus", Crossing(((1, 35700), (24, 6100)), _8B, "measured on an H100")),
    "NVIDIA H200": Best("pariskv-plus", Crossing(((1, 20000), (24, 7900)), _8B, "measured on an H200")),
    "cuda": Best("pariskv-plus", Crossing(((1, 20000), (24, 7900)), _8B, "an H200's, not measured on this GPU")),
    "cpu": Best("icecache-digest", Crossing(((1, 8192),), 0, "two cores, from one length: docs/notes/placement.md")),
}
"""By the name of a GPU, or how it begins; other GPUs, and the CPU. The H200's for 24 sequences is an H100's, by the memory's
bandwidth. `python -m benchmarks.placement` prints such lines."""


def find(method: str | Method, device: torch.device, **options: Any) -> tuple[Method, Crossing | None]:
    """Return the method of a name or "auto" on a device, and for "auto" up to where full attention is the faster way."""
    if not isinstance(method, str) or method.partition(":")[0] != AUTO:
        return resolve(method, **options), None
    check(AUTO, dict(map(written, method.split(":")[1:])) | options)
    best = best_on(torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu")
    return resolve(best.method), best.crossing


def best_on(name: str) -> Best:
    """Return the method for a GPU of a name, as torch gives it, or for "cpu"."""
    return BEST[next((known for known in BEST if name.startswith(known)), "cuda")]


def check_name(method: str | Method) -> None:
    """Raise ConfigError for a name that is no method's, or options that it does not take."""
    find(method, torch.device("cpu"))
