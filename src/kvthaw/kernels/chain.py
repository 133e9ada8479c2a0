"""Programmatic dependent launch: let a kernel start while its predecessor in the stream still runs.

A kernel launched with `launch_pdl` may start before its predecessor ends. Before it calls `follow` it must not read what the
predecessor writes; afterwards all of those writes are visible. Every kernel of a chain waits for its predecessor before it lets
its successor start, so the writes of earlier kernels are visible from the beginning.
"""

from __future__ import annotations

import functools

import torch

from kvthaw.kernels import HAS_TRITON


@functools.cache
def chained(device: torch.device) -> bool:
    """Return whether the device supports programmatic dependent launch (compute capability 9.0 and above)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


if HAS_TRITON:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    @triton.jit
    def follow(PDL: tl.constexpr):
        # Wait for the previous kernel to finish, then let the next one start.
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
