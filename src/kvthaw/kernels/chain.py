"""Kernels that follow each other closely: programmatic dependent launch.

A kernel launched with `launch_pdl` may begin while the one before it in the stream still runs. What it does before `follow`
must not read what that one writes; after it, all of that is there. Since every kernel of a chain waits before it lets the next
begin, what the kernel before the last wrote is there from the start.
"""

from __future__ import annotations

import functools

import torch

from kvthaw.kernels import HAS_TRITON


@functools.cache
def chained(device: torch.device) -> bool:
    """Whether kernels on this device can be launched so (compute capability 9 and up)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


if HAS_TRITON:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    @triton.jit
    def follow(PDL: tl.constexpr):
        # Wait for the kernel before this one, then let the next one begin.
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
