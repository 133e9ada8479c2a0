"""Slots of keys and values on the device, and which of them a decode step attends to.

Rows of slabs that lie in blocks are `in_place.InPlace`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvthaw.regions import Regions

Newest = tuple[Tensor, Tensor]
"""Key and value [B, H, D] of each sequence's newest token, lengths[b] - 1. A step always attends to it, and writes it to its
slot in keys and values. It writes nothing else."""


@dataclass(frozen=True, slots=True)
class AnyOrder:
    """Slots in any order.

    visible: [B, H, N] bool, the slots that a sequence attends to; None: all.
    """

    visible: Tensor | None = None

    def write(self, keys: Tensor, values: Tensor) -> None:
        """Write the newest tokens, none here, to their slots in keys and values [B, H, N, D]."""

    def seen(self, keys: Tensor) -> Tensor:
        """Return the slots of keys [B, H, N, D] that a sequence attends to, [B, H, N] bool, after `write`."""
        return keys.new_ones(keys.shape[:3], dtype=torch.bool) if self.visible is None else self.visible


@dataclass(frozen=True, slots=True)
class TokenOrder:
    """Slots in token order. A sequence attends to slots starts[b] <= n < lengths[b] where `visible` is True.

    lengths, starts: [B] int32; starts None: 0.
    visible: [B, H, N] bool; None: True.
    """

    lengths: Tensor
    newest: Newest | None = None
    starts: Tensor | None = None
    visible: Tensor | None = None

    def write(self, keys: Tensor, values: Tensor) -> None:
        """As AnyOrder.write."""
        if self.newest is not None:
            write(keys, values, self.newest, self.lengths.long() - 1)

    def seen(self, keys: Tensor) -> Tensor:
        """As AnyOrder.seen."""
        place = torch.arange(keys.shape[2], device=keys.device)
        seen = AnyOrder(self.visible).seen(keys) & (place < self.lengths[:, None, None])
        if self.starts is not None:
            seen = seen & (place >= self.starts[:, None, None])
        return seen if self.newest is None else seen | (place == self.lengths[:, None, None] - 1)


@dataclass(frozen=True, slots=True)
class InSlab:
    """Slots of a slab, whose first regions.held slots are sink and ring.

    A sequence attends to positions < lengths[b] in the sink and starts[b] .. lengths[b] in the ring.

    lengths, starts: [B] int32.
    visible: [B, H, N - held] bool, the slots behind sink and ring that it attends to; None: there are none.
    """

    regions: Regions
    lengths: Tensor
    starts: Tensor
    newest: Newest
    visible: Tensor | None = None

    def write(self, keys: Tensor, values: Tensor) -> None:
        """As AnyOrder.write."""
        write(keys, values, self.newest, newest_place(self.lengths, self.regions))

    def seen(self, keys: Tensor) -> Tensor:
        """As AnyOrder.seen."""
        seen = held(self.lengths, self.starts, self.regions)[:, None].expand(-1, keys.shape[1], -1)
        return seen if self.visible is None else torch.cat((seen, self.visible), dim=2)


Places = AnyOrder | TokenOrder | InSlab
"""Which slots of keys and values a sequence attends to. All other slots may hold anything, NaN included."""


def place_of(position: Tensor, sink: int, ring: int) -> Tensor:
    """Return the slab slots of tokens at these positions, which must be in the sink or in the ring."""
    return torch.where(position < sink, position, sink + (position - sink) % ring)


def newest_place(lengths: Tensor, regions: Regions) -> Tensor:
    """Return the slab slot of each sequence's newest token, [B] int64. -1 for an empty sequence."""
    return place_of(lengths.long() - 1, regions.sink, regions.ring)


def held(lengths: Tensor, starts: Tensor, regions: Regions) -> Tensor:
    """Return which slots of sink and ring hold a token, [B, sink + ring] bool.

    lengths, starts: [B].

    The sink holds positions < lengths, the ring holds positions starts .. lengths.
    """
    place, start, length = torch.arange(regions.held, device=lengths.device), starts[:, None], lengths[:, None]
    age = (place - start) % regions.ring  # position - start, as place - sink is position - sink modulo ring
    return torch.where(place < regions.sink, place < length, age < length - start)


def write(keys: Tensor, values: Tensor, newest: Newest, place: Tensor) -> None:
    """Write each sequence's newest token to its slot in keys and values [B, H, N, D]. place [B]; slots outside 0 .. N are
    skipped."""
    for seq, at in enumerate(place.tolist()):
        if 0 <= at < keys.shape[2]:
            keys[seq, :, at], values[seq, :, at] = newest[0][seq], newest[1][seq]
