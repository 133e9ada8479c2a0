"""What a GPU's instructions and compiler offer. torch calls AMD's GPUs "cuda" too and numbers their capabilities otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def by_device(launch: Callable[_Args, _Result], definition: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Return an operation that launches a kernel if the first tensor of its first argument is on a GPU, else computes the
    definition."""

    def run(*args: _Args.args, **options: _Args.kwargs) -> _Result:
        first: Any = args[0]
        while not isinstance(first, Tensor):
            first = first[0]
        return (launch if HAS_TRITON and first.is_cuda else definition)(*args, **options)

    return run


def nvidia(device: torch.device, least: tuple[int, int] = (7, 0)) -> bool:
    """Return whether a device is an NVIDIA GPU of at least this compute capability."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= least


def capturing(device: torch.device) -> bool:
    """Return whether the device's current stream is recorded into a CUDA graph: what is launched now does not run yet."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype to which autocast casts products on a device; None if it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


@contextmanager
def uncached_casts() -> Iterator[None]:
    """Context in which autocast neither keeps weights that it casts nor reads the ones it kept.

    Other streams would read them without waiting. A captured step would read them after autocast has freed them.
    """
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)


if HAS_TRITON:
    import triton.language as tl

    PRECISION = tl.constexpr("tf32x3" if torch.version.hip is None else "ieee")
    """How tl.dot multiplies float32. Triton's compiler for AMD has no products of three tf32 parts."""
