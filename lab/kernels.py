"""What the benchmarks of kernels share: their shape, what the device moves, checks, and times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvthaw.errors import CacheError

T = TypeVar("T")
DEVICE_GBPS, BUS_GBPS = 4300, 55
"""What one H200 was measured to move: device memory, read and written; pinned memory over the bus."""
HEADS, GROUP, DIM = 8, 4, 128
SHAPE = {"bench": "kernels", "kv_heads": HEADS, "group": GROUP, "head_dim": DIM}
COLD = 256 << 20
"""Bytes to pass over before a buffer may be read again: four times the L2 cache."""


def copies(nbytes: int) -> int:
    """Return how many buffers of so many bytes are enough that none is still in the L2 cache when its turn comes again."""
    return max(1, math.ceil(COLD / nbytes))


def rotated(call: Callable[[T], object], sets: Sequence[T], least: int = 4) -> list[Callable[[], object]]:
    """Return a call for each set, at least so many in all."""
    return [partial(call, sets[i % len(sets)]) for i in range(max(least, len(sets)))]


def replay_time(calls: Sequence[Callable[[], object]], replays: int = 30) -> float:
    """Seconds a call takes in a graph of them all, the median over replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, and makes what must exist before a capture
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return eager_time(graph.replay, replays, warm=3, ahead=0) / len(calls)


def eager_time(call: Callable[[], object], runs: int = 5, *, warm: int = 1, ahead: int = 1_000_000) -> float:
    """Seconds of device time, the median of runs after some to warm up. ahead: cycles that the device sleeps before, so that the
    host's work is not counted."""
    times: list[float] = []
    for _ in range(warm + runs):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(ahead)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[warm:]) / 1000


def micros(seconds: float) -> float:
    """Microseconds, as lines have them."""
    return round(seconds * 1e6, 2)


def rates(seconds: float, moved: int, limit: float = DEVICE_GBPS) -> dict[str, Any]:
    """Time, bytes and their share of what the device can move."""
    speed = moved / seconds / 1e9
    return {"us": micros(seconds), "bytes": moved, "gbps": round(speed, 1), "share": round(speed / limit, 3)}


def demand(holds: bool, message: str) -> None:
    """Raise CacheError unless it holds."""
    if not holds:
        raise CacheError(message)


def agree(got: Tensor, want: Tensor, what: str, limit: float = 1e-2) -> float:
    """The distance over the norm. Raises CacheError where it is above the limit or not a number."""
    error = float((got.float() - want.float()).norm() / want.float().norm())
    demand(error < limit, f"{what}: {error:.6f} of the norm off the definition")
    return error


def differing(rows: Tensor, wanted: Tensor) -> int:
    """The most rows of a sequence and head that are not among those wanted."""
    pairs = zip(rows.flatten(0, 1), wanted.flatten(0, 1), strict=True)
    return max(int((~torch.isin(a, b)).sum()) for a, b in pairs)
