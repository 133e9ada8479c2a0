"""Where the device's time goes in a step: how often each kernel was launched and how long it ran."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from kvthaw.errors import CacheError

_STEPS = 8

KERNELS = {
    "attention": ("_attend", "_remainder", "_merge_splits"),
    "fetch": ("_uva_gather",),
    "residency": ("_admit",),
    "query": (
        *("_planes", "_signs", "_tiers", "_collide", "_bucket_topk", "_rerank", "_count"),
        *("_choose", "_score", "_narrow", "_read"),
    ),
    "updates": (
        *("_encode", "_freeze", "_interleave", "_extend", "_stream_keys", "_denominators", "_mass", "_page_bounds"),
        *("_page_means", "_assign", "_average", "_rank", "_sort", "_cover", "_direct", "_nearest", "_digest", "_static_first"),
    ),
    "prompt": ("_merge_parts", "_packed"),
    "model": ("_rms_norm", "_rotate", "_gated"),
    "weights": ("_linear", "_linear_int4"),
    "sums": ("_add_up",),
}
"""Part of a step, or of what happens between steps and at the prompt -> kvthaw's kernels that do it."""
_PARTS = (
    ("attention", re.compile(r"flash|fmha|sdpa|softmax", re.I)),
    ("weights", re.compile(r"gemm|gemv|nvjet|cutlass|cublas|splitk|triton_tem|_mm", re.I)),
    ("copies", re.compile(r"memcpy|memset", re.I)),
)
"""What else a kernel's name says; all others are "other", most of them the model's own small ones."""


def part_of(kernel: str) -> str:
    """Which part of a step a kernel does."""
    for part, names in KERNELS.items():
        if kernel in names:
            return part
    return next((part for part, pattern in _PARTS if pattern.search(kernel)), "other")


def launches(step: Callable[[], object]) -> dict[str, Any]:
    """Run a step some times under the profiler, which slows the host and not the kernels. It stays in the process: graphs that are
    captured later take the host longer to launch, and their kernels may stand further apart, so nothing is timed after it.

    Returns, of one step in the mean: launches, kernels and copies on the device; device_s, the seconds they ran, so that the
    rest of a step's time is gaps between them; parts_s, the same by part; kernels, a list of {name, launches, us}, the
    longest first. What is not of every step (a full ring) has a fraction of a launch. Raises CacheError where the profiler
    sees no device.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(_STEPS):
            step()
        torch.cuda.synchronize()
    events = [(e.name, e.time_range.elapsed_us()) for e in seen.events() or () if e.device_type.name == "CUDA"]
    if not events:
        raise CacheError("the profiler saw no kernel; it may not be allowed to look at this device")
    return summary(events, _STEPS)


def summary(events: list[tuple[str, float]], steps: int) -> dict[str, Any]:
    """What `launches` returns, from the names and microseconds of all events of so many steps."""
    kernels: dict[str, list[float]] = {}
    for name, us in events:
        kernels.setdefault(name, []).append(us)
    parts: dict[str, float] = {}
    for name, times in kernels.items():
        part = part_of(name)
        parts[part] = parts.get(part, 0.0) + sum(times) / steps / 1e6
    ordered = sorted(kernels.items(), key=lambda item: -sum(item[1]))
    return {
        "launches": round(len(events) / steps, 2),
        "device_s": sum(us for _, us in events) / steps / 1e6,
        "parts_s": parts,
        "kernels": [
            {"name": name[:100], "launches": round(len(times) / steps, 2), "us": round(sum(times) / steps, 2)}
            for name, times in ordered
        ],
    }
