"""Programmatic dependent launch: let a kernel start while its predecessor in the stream still runs.

A kernel launched with `dependent` may start before its predecessor ends. Before it calls `follow` it must not read what the
predecessor writes; afterwards all of those writes are visible. Every kernel of a chain waits for its predecessor before it
lets its successor start. The writes of all earlier kernels but the predecessor are therefore visible from the beginning.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.gpu import nvidia


@functools.cache
def dependent(device: torch.device) -> dict[str, Any]:
    """Return the launch arguments of a kernel that follows another, PDL among them: for compute capability 9.0 and above."""
    return {"PDL": True, "launch_pdl": True} if nvidia(device, (9, 0)) else {"PDL": False}


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
