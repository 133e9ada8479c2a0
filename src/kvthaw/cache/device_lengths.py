"""The lengths of a cache's sequences on the device, for kernels and captured steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


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


class DeviceLengths:
    """Per-sequence counters of a step on the device, [B] int32 each. The host knows their values and writes only changes.

    Their addresses change only with the number of sequences.

    lengths: tokens, the newest included.
    starts: first position in the ring.
    live: 1 for sequences that get a token in this step.
    """

    _known: tuple[Any, ...]  # lengths, starts, live, device

    def __init__(self) -> None:
        self.lengths = self.starts = self.live = torch.empty(0, dtype=torch.int32)
        self.forget()

    def set(self, lengths: Sequence[int], starts: Sequence[int], live: Sequence[int], device: torch.device) -> None:
        """Set all values. If every live sequence only gained one token, this is a single addition on the device."""
        want = tuple(lengths), tuple(starts), tuple(live), device
        if want == self._known:
            return
        one_less, known = tuple(n - new for n, new in zip(lengths, live, strict=True)), self._known
        self.forget()  # a write that fails may have changed some values
        if (one_less, *want[1:]) == known:
            self.lengths.add_(self.live)
        else:
            if self.lengths.shape != (len(lengths),) or self.lengths.device != device:
                self.lengths = torch.empty(len(lengths), dtype=torch.int32, device=device)
                self.starts, self.live = torch.empty_like(self.lengths), torch.empty_like(self.lengths)
            for tensor, values in zip(self.tensors(), want[:3], strict=True):
                tensor.copy_(upload(values, torch.int32, device))
        self._known = want

    def advance(self) -> None:
        """Record that a replayed step has added a token to every live sequence."""
        lengths, starts, live, device = self._known
        self._known = tuple(n + new for n, new in zip(lengths, live, strict=True)), starts, live, device

    def forget(self) -> None:
        """Mark the values as unknown after a replayed step failed."""
        self._known = (), (), (), None

    def tensors(self) -> list[Tensor]:
        """Return the tensors that a captured step reads and writes."""
        return [self.lengths, self.starts, self.live]
