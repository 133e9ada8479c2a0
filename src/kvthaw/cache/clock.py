"""How many tokens the lanes have and where their rings begin, on the device: the same for all layers of a step."""

from __future__ import annotations

import torch


class Clock:
    """Counters of the lanes at one step.

    length [B] int32: tokens, the newest included. start [B] int32: where the ring begins. live [B] int32: 1 for lanes that a step
    gives a token, 0 for the others. Where the newest token stands and which places hold one follows from them, in the kernels that
    ask. Their addresses stay while the number of lanes does, and a step forward is one addition on the device, so a step that was
    captured in a graph can be replayed.
    """

    def __init__(self) -> None:
        self._now: tuple[tuple[int, ...], tuple[int, ...], tuple[bool, ...], torch.device] | None = None
        self.length = self.start = self.live = torch.empty(0, dtype=torch.int32)

    def at(
        self, lengths: tuple[int, ...], starts: tuple[int, ...], device: torch.device, live: tuple[bool, ...] | None = None
    ) -> None:
        """Be at the step where lanes have `lengths` tokens, the newest included, and their rings begin at `starts`. live: lanes
        that have a newest token; None: all."""
        live = live or (True,) * len(lengths)
        now = (lengths, starts, live, device)
        if now == self._now:
            return
        if (tuple(n - new for n, new in zip(lengths, live, strict=True)), *now[1:]) == self._now:
            self.length.add_(self.live)
        else:
            self._set(lengths, starts, live, device)
        self._now = now

    def passed(self) -> None:
        """A replayed step advanced the tensors; remember where they are."""
        assert self._now is not None
        lengths, starts, live, device = self._now
        self._now = (tuple(n + new for n, new in zip(lengths, live, strict=True)), starts, live, device)

    def forget(self) -> None:
        """A step failed somewhere: where the tensors are is not known, and at() sets them whatever it was."""
        self._now = None

    def tensors(self) -> list[torch.Tensor]:
        """What a step reads and writes at fixed addresses."""
        return [self.length, self.start, self.live]

    def _set(self, lengths: tuple[int, ...], starts: tuple[int, ...], live: tuple[bool, ...], device: torch.device) -> None:
        if self.length.shape != (len(lengths),) or self.length.device != device:
            self.length = torch.empty(len(lengths), dtype=torch.int32, device=device)
            self.start, self.live = torch.empty_like(self.length), torch.empty_like(self.length)
        for tensor, values in ((self.length, lengths), (self.start, starts), (self.live, live)):
            tensor.copy_(torch.tensor(values, dtype=torch.int32), non_blocking=True)

    def __deepcopy__(self, memo: dict[int, object]) -> Clock:
        return Clock()
