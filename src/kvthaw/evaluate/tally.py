"""What each row of a batch attended to and holds, counted as if the row were alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvthaw.cache.group import Choice
from kvthaw.cache.layer import FrozenLayer

if TYPE_CHECKING:
    from kvthaw.engine.hf import Cache


@dataclass(frozen=True, slots=True)
class RowStats:
    """As `kvthaw.engine.hf.Stats`, of one row."""

    budget: int | None
    sparse_steps: int
    attended_mean: float | None
    attended_max: int | None
    retrieved: float | None
    hit_rate: float | None
    kv_device_bytes: int
    kv_dense_bytes: int
    kv_host_bytes: int


class Tally:
    """Observes the layers of a cache that choose, beside whoever observes them already."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._begin = [cache.kv_layers[0].length(lane) for lane in range(cache.kv_layers[0].lanes)]
        self._counted: list[Tensor] = []  # a layer and step each, [B, 3]: rows selected, rows fetched, the most of a head
        self._choosing = [kv for kv in cache.frozen_layers if kv.leader is None and kv.group is not None]
        self._others = {kv.number: kv.observer for kv in self._choosing}
        self._host: dict[int, int] = {}
        for kv in self._choosing:
            kv.observer = self._observe

    def detach(self) -> None:
        """Observe no more."""
        for kv in self._choosing:
            kv.observer = self._others[kv.number]

    def ended(self, row: int) -> None:
        """A row has sent its last token: what it holds on the host now is what counts."""
        self._host.setdefault(row, sum(kv.host_bytes(row) for kv in self._cache.frozen_layers))

    def rows(self, steps: list[int]) -> list[RowStats]:
        """The stats of every row, each of which sent so many tokens. Waits for the device."""
        anchors = len(self._choosing)
        each = torch.stack(self._counted).cpu().reshape(-1, anchors, len(steps), 3) if self._counted else None
        return [self._row(row, count, None if each is None else each[:count, :, row]) for row, count in enumerate(steps)]

    def _row(self, row: int, steps: int, counted: Tensor | None) -> RowStats:
        """counted [steps, anchors, 3]."""
        layers, frozen = self._cache.kv_layers, self._cache.frozen_layers
        end = self._begin[row] + steps
        dense = sum(kv.token_bytes() * end for kv in layers if not isinstance(kv, FrozenLayer))
        held = [frozen[0].held(row, n) for n in range(self._begin[row] + 1, end + 1)] if frozen else []
        selected = fetched = most = 0
        if counted is not None and steps:
            selected, fetched = int(counted[:, :, 0].sum()), int(counted[:, :, 1].sum())
            most = int(counted[:, :, 2].max())
        heads = frozen[0].slab.data.shape[1] if frozen else 0
        retrieved = selected / (steps * len(self._choosing) * heads) if steps and self._choosing else 0.0
        self.ended(row)
        return RowStats(
            budget=frozen[0].plan.budget if frozen and frozen[0].plan else None,
            sparse_steps=steps * len(frozen),
            attended_mean=sum(held) / len(held) + retrieved if held else None,
            attended_max=max(held) + most if held else None,
            retrieved=retrieved if held else None,
            hit_rate=1 - fetched / selected if selected else None,
            kv_device_bytes=sum(kv.device_bytes() for kv in frozen) // len(self._begin),
            kv_dense_bytes=dense,
            kv_host_bytes=self._host[row],
        )

    def _observe(self, layer: FrozenLayer, query: Tensor, choice: Choice | None) -> None:
        other = self._others[layer.number]
        if other is not None:
            other(layer, query, choice)
        assert choice is not None
        counts = choice.selection.counts
        fetch = choice.fetch if choice.host is None else choice.host[1]
        self._counted.append(torch.stack((counts.sum(dim=1), (fetch >= 0).sum(dim=(1, 2)), counts.amax(dim=1)), dim=1))
