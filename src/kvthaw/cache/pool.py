"""The thawed part of one layer: sink, ring and pool in one tensor on the device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvthaw.regions import Regions


class Slab:
    """data [B, H, N, 2, D] with N = sink + ring + slots: first the sink by position, then the ring, then the pool's slots.

    One tensor, so that a decode step is one attention over it under a mask. It starts as zeros and holds only what was written,
    so places that the mask hides are finite. tickets [B * H + 1] int32: see `kvthaw.kernels.flash_decode`.
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
        """[B, H, N, D], a view."""
        return self.data[:, :, :, 0]

    @property
    def values(self) -> Tensor:
        """[B, H, N, D], a view."""
        return self.data[:, :, :, 1]

    def held(self) -> Tensor:
        """Sink and ring, [B, H, sink + ring, 2, D], a view."""
        return self.data[:, :, : self.pool_start]

    def runs(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the places of the tokens of positions start .. stop while they are in the sink or in the ring, as places that
        neighbour each other, from .. to: at most three pieces."""
        sink, ring, found = self.regions.sink, self.regions.ring, []
        while start < stop:
            place = start if start < sink else sink + (start - sink) % ring
            end = sink if start < sink else sink + ring
            n = min(stop - start, end - place)
            found.append((place, place + n))
            start += n
        return found

    def write(self, seq: int, start: int, rows: Tensor) -> None:
        """Put rows [H, n, 2, D], positions start .. start + n, in their places; n no more than fits in sink and ring."""
        done = 0
        for place, end in self.runs(start, start + rows.shape[1]):
            self.data[seq, :, place:end].copy_(rows[:, done : done + end - place])
            done += end - place

    def read(self, seq: int, start: int, stop: int) -> Tensor:
        """Return rows [H, stop - start, 2, D] of positions that stand in the sink or in the ring, of the caller's own."""
        pieces = [self.data[seq, :, place:end] for place, end in self.runs(start, stop)]
        return torch.cat(pieces or [self.data[seq, :, :0]], dim=1)

    def widen(self, slots: int) -> None:
        """Add slots, in a new tensor."""
        self.data = F.pad(self.data, (0, 0, 0, 0, 0, slots - self.slots))
        self.slots = slots

    def reorder(self, seqs: Tensor) -> None:
        """Sequence i becomes what sequence seqs[i] was; sequences [B'] int64."""
        self.data = self.data.index_select(0, seqs)
        self.tickets = self.tickets.new_zeros(self.data.shape[0] * self.data.shape[1] + 1)
