"""The device slab of one layer: sink, ring and pool in one tensor."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvthaw.regions import Regions


class Slab:
    """One tensor for sink, ring and pool, so that a decode step is one masked attention over it.

    It starts as zeros and holds only written rows, so slots that the mask hides are finite.

    data: [B, H, N, 2, D] with N = sink + ring + slots: the sink by position, then the ring, then the pool's slots.
    tickets: [B * H + 1] int32; see `kvthaw.kernels.flash_decode`.
    """

    def __init__(
        self,
        seqs: int,
        kv_heads: int,
        head_dim: int,
        regions: Regions,
        slots: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.regions, self.slots = regions, slots
        self.pool_start = regions.sink + regions.ring
        self.data = torch.zeros((seqs, kv_heads, self.pool_start + slots, 2, head_dim), dtype=dtype, device=device)
        self.tickets = torch.zeros(seqs * kv_heads + 1, dtype=torch.int32, device=device)

    @property
    def keys(self) -> Tensor:
        """Keys [B, H, N, D], a view."""
        return self.data[:, :, :, 0]

    @property
    def values(self) -> Tensor:
        """Values [B, H, N, D], a view."""
        return self.data[:, :, :, 1]

    def held(self) -> Tensor:
        """Return sink and ring, [B, H, sink + ring, 2, D], a view."""
        return self.data[:, :, : self.pool_start]

    def runs(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the slots of positions start .. stop in sink and ring, as at most three (first, end) runs of adjacent slots."""
        sink, ring, found = self.regions.sink, self.regions.ring, []
        while start < stop:
            place = start if start < sink else sink + (start - sink) % ring
            end = sink if start < sink else sink + ring
            n = min(stop - start, end - place)
            found.append((place, place + n))
            start += n
        return found

    def write(self, seq: int, start: int, rows: Tensor) -> None:
        """Write rows [H, n, 2, D] of positions start .. start + n to their slots. They must fit in sink and ring."""
        done = 0
        for place, end in self.runs(start, start + rows.shape[1]):
            self.data[seq, :, place:end].copy_(rows[:, done : done + end - place])
            done += end - place

    def read(self, seq: int, start: int, stop: int) -> Tensor:
        """Return a copy of rows start .. stop, [H, stop - start, 2, D], which are in sink or ring."""
        pieces = [self.data[seq, :, place:end] for place, end in self.runs(start, stop)]
        return torch.cat(pieces or [self.data[seq, :, :0]], dim=1)

    def widen(self, slots: int) -> None:
        """Add slots, in a new tensor."""
        self.data = F.pad(self.data, (0, 0, 0, 0, 0, slots - self.slots))
        self.slots = slots

    def reorder(self, seqs: Tensor) -> None:
        """Replace sequence i by the former sequence seqs[i]; seqs [B'] int64."""
        self.data = self.data.index_select(0, seqs)
        self.tickets = self.tickets.new_zeros(self.data.shape[0] * self.data.shape[1] + 1)
