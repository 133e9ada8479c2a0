"""Where the next token goes and which places hold one, as tensors on the device: the same for all layers of a step."""

from __future__ import annotations

import torch

from kvthaw.cache.regions import Regions


class Clock:
    """Counters of the lanes at one step.

    place [B] int64: where in sink or ring the newest token stands. held [B, sink + ring] bool: the places that hold a token. length
    [B] int64: tokens, the newest included. Their addresses stay while the number of lanes does, and advance() is device work alone,
    so a step that was captured in a graph can be replayed.
    """

    def __init__(self) -> None:
        self._now: tuple[Regions, tuple[int, ...], tuple[int, ...], torch.device] | None = None
        self.length = self.place = self.held = torch.empty(0)

    def at(self, regions: Regions, lengths: tuple[int, ...], starts: tuple[int, ...], device: torch.device) -> None:
        """Be at the step where lanes have `lengths` tokens, the newest included, and their rings begin at `starts`."""
        now = (regions, lengths, starts, device)
        if now == self._now:
            return
        before = (regions, tuple(n - 1 for n in lengths), starts, device)
        if before == self._now:
            self.advance()
        else:
            self._set(regions, lengths, starts, device)
        self._now = now

    def advance(self) -> None:
        """One more token a lane."""
        self.length.add_(1)
        self._derive()

    def passed(self) -> None:
        """A replayed step advanced the tensors; remember where they are."""
        assert self._now is not None
        regions, lengths, starts, device = self._now
        self._now = (regions, tuple(n + 1 for n in lengths), starts, device)

    def _set(self, regions: Regions, lengths: tuple[int, ...], starts: tuple[int, ...], device: torch.device) -> None:
        if self.length.shape != (len(lengths),) or self.held.shape[1:] != (regions.held,) or self.held.device != device:
            self.length = torch.empty(len(lengths), dtype=torch.int64, device=device)
            self.place, self._start = torch.empty_like(self.length), torch.empty_like(self.length)
            self.held = torch.empty((len(lengths), regions.held), dtype=torch.bool, device=device)
            self._places = torch.arange(regions.held, device=device)
        self._regions = regions
        self.length.copy_(torch.tensor(lengths), non_blocking=True)
        self._start.copy_(torch.tensor(starts), non_blocking=True)
        self._derive()

    def _derive(self) -> None:
        sink, ring = self._regions.sink, self._regions.ring
        newest = self.length - 1
        self.place.copy_(torch.where(newest < sink, newest, sink + (newest - sink) % ring))
        start, length = self._start[:, None], self.length[:, None]
        age = (self._places - start) % ring  # place - sink is position - sink modulo ring, so this is position - start
        self.held.copy_(torch.where(self._places < sink, self._places < length, age < length - start))

    def __deepcopy__(self, memo: dict[int, object]) -> Clock:
        return Clock()
