"""What a GPU's instructions and compiler offer, and copies between host and device for which the host does not wait.

torch calls AMD's GPUs "cuda" too and numbers their capabilities otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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


def upload(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor on the device. The host does not wait for the GPU."""
    return sent(torch.tensor(values, dtype=dtype), device)


def sent(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device. The host does not wait for the GPU."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" and not x.is_cuda else x.to(device)


def to_host(x: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Return a tensor on the CPU in float32, contiguous if it came from a GPU, and the event that ends its copy."""
    if not x.is_cuda:
        return x.float(), None
    here = torch.empty(x.shape, dtype=torch.float32, pin_memory=True).copy_(x.float(), non_blocking=True)
    return here, torch.cuda.current_stream(x.device).record_event()


class Download:
    """A tensor that is being copied to the host. A call waits for this copy only, not for later GPU work, and returns the
    tensor."""

    def __init__(self, x: Tensor) -> None:
        self._here = x
        self._copied: torch.cuda.Event | None = None
        if x.is_cuda:
            self._here = torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
            self._copied = torch.cuda.current_stream(x.device).record_event()

    def __call__(self) -> Tensor:
        if self._copied is not None:
            self._copied.synchronize()
        return self._here

    def ready(self) -> bool:
        """Return whether a call would return without waiting."""
        return self._copied is None or self._copied.query()
