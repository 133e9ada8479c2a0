"""How many tokens the lanes have and where their rings begin, on the device: the same for all layers of a step."""

from __future__ import annotations

import torch


class Clock:
    """Counters of the lanes at one step.

    length [B] int32: tokens, the newest included. start [B] int32: where the ring begins. Where the newest token stands and which
    places hold one follows from them, in the kernels that ask. Their addresses stay while the number of lanes does, and a step
    forward is one addition on the device, so a step that was captured in a graph can be replayed.
    """

    def __init__(self) -> None:
        self._now: tuple[tuple[int, ...], tuple[int, ...], torch.device] | None = None
        self.length = self.start = torch.empty(0, dtype=torch.int32)

    def at(self, lengths: tuple[int, ...], starts: tuple[int, ...], device: torch.device) -> None:
        """Be at the step where lanes have `lengths` tokens, the newest included, and their rings begin at `starts`."""
        now = (lengths, starts, device)
        if now == self._now:
            return
        if (tuple(n - 1 for n in lengths), starts, device) == self._now:
            self.length.add_(1)
        else:
            self._set(lengths, starts, device)
        self._now = now

    def passed(self) -> None:
        """A replayed step advanced the tensors; remember where they are."""
        assert self._now is not None
        lengths, starts, device = self._now
        self._now = (tuple(n + 1 for n in lengths), starts, device)

    def _set(self, lengths: tuple[int, ...], starts: tuple[int, ...], device: torch.device) -> None:
        if self.length.shape != (len(lengths),) or self.length.device != device:
            self.length = torch.empty(len(lengths), dtype=torch.int32, device=device)
            self.start = torch.empty_like(self.length)
        self.length.copy_(torch.tensor(lengths), non_blocking=True)
        self.start.copy_(torch.tensor(starts), non_blocking=True)

    def __deepcopy__(self, memo: dict[int, object]) -> Clock:
        return Clock()
