"""Estimate the time of a decode step from the bytes that it reads, with constants per GPU and method.

The constants are fitted to lab/results/decode.jsonl.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvthaw.errors import unknown

Basis = Literal["expected", "estimated"]
"""How well a time is known.

"expected": GPU and method were measured, on an 8B model. "estimated": computed from the maker's bandwidth or from a similar
method.
"""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU.

    name: the beginning of torch's name for it.
    memory: bytes.
    bandwidth: bytes per second that steps read from its memory.
    bus: bytes per second that steps read from host memory.
    layer_us: microseconds per layer of a captured step of one sequence, in addition to reading.
    measured: the numbers are measured; else they follow from the maker's.
    """

    name: str
    memory: int
    bandwidth: float
    bus: float
    layer_us: float
    measured: bool = False


def _by_maker(name: str, mib: int, bandwidth: float, *, pcie: int) -> Gpu:
    """Return a GPU by its maker's figures. Steps read at 85 % of its bandwidth, as the H100's do."""
    return Gpu(name, mib << 20, 0.85 * bandwidth, {4: 23e9, 5: 47e9}[pcie], 90)


GPUS = {
    "H200": Gpu("NVIDIA H200", 143_771 << 20, 4.47e12, 47e9, 25, measured=True),
    "H100": Gpu("NVIDIA H100", 81_559 << 20, 2.78e12, 47e9, 25),
    "A100": _by_maker("NVIDIA A100", 81_920, 2.04e12, pcie=4),
    "L40S": _by_maker("NVIDIA L40S", 46_068, 0.86e12, pcie=4),
    "L4": _by_maker("NVIDIA L4", 23_034, 0.30e12, pcie=4),
    "RTX-5090": _by_maker("NVIDIA GeForce RTX 5090", 32_607, 1.79e12, pcie=5),
    "RTX-4090": _by_maker("NVIDIA GeForce RTX 4090", 24_564, 1.01e12, pcie=4),
    "RTX-3090": _by_maker("NVIDIA GeForce RTX 3090", 24_576, 0.94e12, pcie=4),
}
"""By short name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine that a model runs on. None: unknown, or without a limit.

    gpu: None for a CPU, or for a GPU with only its memory known.
    gpu_memory, host_memory: bytes.
    cpu: there is no GPU.
    """

    gpu: Gpu | None = None
    gpu_memory: int | None = None
    host_memory: int | None = None
    cpu: bool = False


@dataclass(frozen=True, slots=True)
class Search:
    """Time of a layer that selects, besides its weights and the rows that cross the bus, on an H200 with a host of 16 cores.

    fixed_us: microseconds.
    per_million_us: additional microseconds per million keys of its index.
    lengths: number of lengths that were measured.
    """

    fixed_us: float
    per_million_us: float
    lengths: int


_BATCH_US = 50
"""Microseconds that a layer takes longer for several sequences: they have other kernels for its linear layers."""
_SEQUENCE_US = 5
"""Microseconds that a layer which selects takes for each further sequence of a batch."""
SEARCHES = {
    "full": Search(0, 0, 6),
    "streaming": Search(0, 0, 1),
    "thaw": Search(38, 12, 2),
    "pariskv-plus": Search(38, 10.5, 4),
    "pariskv": Search(50, 10.5, 1),
    "clusterkv-plus": Search(48, 10, 3),
    "clusterkv": Search(43, 10, 1),
    "prkv": Search(50, 16, 1),
    "prkv-plus": Search(45, 16, 3),
    "icecache-digest-device": Search(97, 132, 1),
    "icecache-digest": Search(450, 1300, 1),
}
"""By method. If only one length was measured, the growth with length is a similar method's, or of earlier steps."""


def find_gpu(name: str) -> Gpu:
    """Return a GPU by its short name, in any case. Raises ConfigError."""
    for short, gpu in GPUS.items():
        if name.lower() == short.lower():
            return gpu
    raise unknown("gpu", name, GPUS)


def known_gpu(name: str) -> Gpu | None:
    """Return a GPU by the name that torch gives it, None for one that is not in the table."""
    return next((gpu for gpu in GPUS.values() if name.startswith(gpu.name)), None)


def step_seconds(
    gpu: Gpu, method: str, *, layers: int, searching: int, batch: int, keys: int, read: int, fetched: int
) -> tuple[float, Basis] | None:
    """Return the seconds of a captured decode step, and how well they are known; None for a method that was not measured.

    method: with its options.
    layers: number of layers of the model.
    searching: number of layers that select.
    keys: keys that one of them searches, over all heads and all sequences of the batch.
    read: bytes of weights and of dense layers' KV that a step reads.
    fetched: bytes of rows that a step fetches from the host.
    """
    base, _, given = method.partition(":")
    search = SEARCHES.get(base)
    if search is None:
        return None
    select = search.fixed_us + search.per_million_us * keys / 1e6 + _SEQUENCE_US * (batch - 1)
    micros = layers * (gpu.layer_us + (_BATCH_US if batch > 1 else 0)) + searching * select
    known = gpu.measured and search.lengths > 1 and not given
    return micros / 1e6 + read / gpu.bandwidth + fetched / gpu.bus, "expected" if known else "estimated"
