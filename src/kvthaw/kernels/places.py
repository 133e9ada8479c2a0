"""Slots of keys and values on the device: in token order, or in a slab with sink and ring."""

from __future__ import annotations

import torch
from torch import Tensor

from kvthaw.regions import Regions

Newest = tuple[Tensor, Tensor]
"""Key and value [B, H, D] of each sequence's newest token."""


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
