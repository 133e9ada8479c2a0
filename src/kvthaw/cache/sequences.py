"""The sequences of a cache: their lengths on the host, and on the device for kernels and captured steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvthaw.cache.lengths import Lengths
from kvthaw.cache.step import Step
from kvthaw.kernels.gpu import upload


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


@dataclass(eq=False)
class Sequences(Lengths):
    """The sequences of one cache.

    on_device: the lengths for kernels and captured steps.
    """

    on_device: DeviceLengths = field(default_factory=DeviceLengths)

    def place(self, step: Step, token: int, device: torch.device) -> None:
        """Set the device's lengths to token `token` of the step, counted from 0."""
        self._set(step.lengths(token + 1), device)
        self.known.placed = step, token

    def place_before_step(self, device: torch.device) -> None:
        """Set the device's lengths to the committed ones, and its ring starts as of the next token.

        A captured step advances the lengths itself. Does nothing if they are set already.
        """
        if self.known.placed != (self.padded_length, device):
            self._set(self._live_lengths(), device, coming=1)
            self.known.placed = self.padded_length, device

    def place_again(self, step: Step, device: torch.device) -> None:
        """Set the device's lengths as after the last token of the latest step, committed or not, for layers that reuse another
        layer's keys."""
        if self.step is step:
            self.place(step, step.tokens - 1, device)
        else:
            self._set(self._live_lengths(), device)

    def count_replay(self) -> None:
        """Record that a replayed step has advanced the device's lengths by a token."""
        self.on_device.advance()
        self.known.placed = None

    def forget_device(self) -> None:
        """Mark the device's lengths as unknown after a replayed step failed."""
        self.on_device.forget()
        self.known.placed = None

    def _live_lengths(self) -> list[int]:
        return [0 if seq in self.idle else self.length(seq) for seq in range(self.count)]

    def _set(self, lengths: list[int], device: torch.device, coming: int = 0) -> None:
        live = [int(seq not in self.idle) for seq in range(len(lengths))]
        starts = [0] * len(lengths)
        if self.ring_start:
            starts = [self.indexed(seq, n + coming * new) for seq, (n, new) in enumerate(zip(lengths, live, strict=True))]
        self.on_device.set(lengths, starts, live, device)
        self.known.placed = None
