"""Lines of the decode benchmark: what was measured of a setting, kept in a file that a later run continues."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvthaw.bench.settings import Setting
from kvthaw.evaluate.results import AsLine, Kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Line(AsLine):
    """One way to take steps with one cache. Seconds are of the clock, bytes of K and V unless they say otherwise.

    ttft_s, tt2t_s: from the start of the prompt, after a cold run of the same prompt (cold_*) that compiled kernels and
    touched host memory first; the second token's step is eager and waits for the index. fill_s: instead, of a filled cache.
    tpot_s: the mean of all steps, those that update an index among them; itl_*: of single steps. elapsed_s: after so many of
    them. peak_device_bytes: everything that torch held during the steps. weight_bytes: of the model.
    full_kv_bytes: all KV at this length. kv_device_bytes: sink, ring and pool; index_device_bytes: what indexes, residency
    and tables of addresses take there; kv_dense_bytes: of the layers that are kept dense. share_of_full: the first two, of
    the same layers' KV; share_with_dense: all three, of all KV. kv_host_bytes: memory held there; kv_frozen_bytes: what it
    stands for, larger where rows or layers share it. index_host_bytes: None where the index does not tell.
    budget, dense_layers, attended_*, retrieved: as in `kvthaw.engine.hf.Stats`. hit_rate: of the steps that count.
    fetched_bytes and stored_bytes: to and from the device, a step; searched_bytes: what the search reads from the host to choose;
    bus_bytes: all three.
    floor_s: the larger of floor_device_s (weights read in a step and KV attended to, at the device's copy speed) and
    floor_bus_s (bytes fetched at the bus's); floor_ratio: tpot_s over it. parts_s: of an eager step, with the device idle
    before each part, or of a captured one's kernels if they were profiled (launches, device_s and kernels then too, see
    `kvthaw.bench.launches`). captures, capture_s: of graphs; capture_bytes: of the device, for the last.
    about: machine, versions and commit.
    """

    setting: Setting
    ttft_s: float | None
    tt2t_s: float | None
    cold_ttft_s: float | None
    cold_tt2t_s: float | None
    fill_s: float | None
    tpot_s: float
    itl_p50_s: float
    itl_p95_s: float
    elapsed_s: dict[str, float]
    tokens_per_s: float
    peak_device_bytes: int | None
    weight_bytes: int
    full_kv_bytes: int
    kv_device_bytes: int
    index_device_bytes: int
    kv_dense_bytes: int
    share_of_full: float | None
    share_with_dense: float
    kv_host_bytes: int
    kv_frozen_bytes: int
    index_host_bytes: int | None
    budget: int | None
    dense_layers: int
    attended_mean: float | None
    attended_max: int | None
    retrieved: float | None
    hit_rate: float | None
    fetched_bytes: float
    stored_bytes: float
    bus_bytes: float
    floor_device_s: float
    floor_bus_s: float | None
    floor_s: float
    floor_ratio: float
    searched_bytes: float = 0.0
    parts_s: dict[str, float] = field(default_factory=dict)
    captures: int | None = None
    capture_s: float | None = None
    capture_bytes: int | None = None
    launches: float | None = None
    device_s: float | None = None
    kernels: list[dict[str, Any]] | None = None
    about: dict[str, Any] = field(default_factory=dict)

    def brief(self) -> str:
        """What was measured, in a few words."""
        mean, median, most = (f"{1e3 * seconds:.2f}" for seconds in (self.tpot_s, self.itl_p50_s, self.itl_p95_s))
        words = [f"{self.setting}: {mean} ms a token (median {median}, p95 {most})", f"{self.tokens_per_s:.0f} tokens/s"]
        for name, value in (("prompt", self.ttft_s), ("filled in", self.fill_s)):
            if value is not None:
                words.append(f"{name} {value:.2f} s")
        if self.hit_rate is not None:
            words.append(f"{self.hit_rate:.1%} hits")
        if self.share_of_full is not None:
            words.append(f"{self.share_of_full:.1%} of full's KV")
        return ", ".join(words)

    @staticmethod
    def from_json(text: str) -> Line:
        """The reverse. Raises ValueError, KeyError or TypeError for anything else."""
        data = json.loads(text)
        data["setting"] = Setting(**data["setting"])
        return Line(**data)


class Lines(Kept[Line]):
    """Lines by setting, see `kvthaw.evaluate.results.Kept`."""

    def __init__(self, path: Path | None = None) -> None:
        super().__init__(path, Line.from_json)
