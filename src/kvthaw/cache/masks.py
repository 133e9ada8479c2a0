"""Which places of sink and ring hold a token: the same for all layers of a step, so made once."""

from __future__ import annotations

import torch
from torch import Tensor

from kvthaw.cache.regions import Regions


class HeldMasks:
    """Remembers the mask of the last step."""

    def __init__(self) -> None:
        self._key: object = None
        self._mask: Tensor | None = None

    def held(self, regions: Regions, spans: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
        """[B, sink + ring] bool. spans: of each lane (where its ring begins, tokens it has)."""
        key = (regions, spans, device)
        if self._mask is None or key != self._key:
            place = torch.arange(regions.sink + regions.ring)
            start, length = (torch.tensor(column)[:, None] for column in zip(*spans, strict=True))
            age = (place - start) % regions.ring  # the ring's tokens by age; place - sink is position - sink modulo ring
            held = torch.where(place < regions.sink, place < length, age < length - start)
            self._key, self._mask = key, held.to(device, non_blocking=True)
        return self._mask

    def __deepcopy__(self, memo: dict[int, object]) -> HeldMasks:
        return HeldMasks()
