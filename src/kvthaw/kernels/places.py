"""The places of keys and values that a lane sees in a decode step, in token order or as a slab with sink and ring."""

from __future__ import annotations

import torch
from torch import Tensor

from kvthaw.regions import Regions

Newest = tuple[Tensor, Tensor]
"""Key and value [B, H, D] of each lane's last token."""


def place_of(position: Tensor, sink: int, ring: int) -> Tensor:
    """Where tokens of these positions stand while they are in the sink or in the ring."""
    return torch.where(position < sink, position, sink + (position - sink) % ring)


def newest_place(lengths: Tensor, regions: Regions | None) -> Tensor:
    """[B] int64: where the last of a lane's `lengths` tokens stands, in token order or in sink and ring; -1 where there is none."""
    last = lengths.long() - 1
    return last if regions is None else place_of(last, regions.sink, regions.ring)


def held(lengths: Tensor, starts: Tensor, regions: Regions) -> Tensor:
    """[B, sink + ring] bool: the places of sink and ring that hold a token, in the sink positions < lengths, in the ring positions
    starts .. lengths. lengths, starts: [B]."""
    place, start, length = torch.arange(regions.held, device=lengths.device), starts[:, None], lengths[:, None]
    age = (place - start) % regions.ring  # place - sink is position - sink modulo ring, so this is position - start
    return torch.where(place < regions.sink, place < length, age < length - start)


def write(keys: Tensor, values: Tensor, newest: Newest, place: Tensor) -> None:
    """Put each lane's newest token in its place [B] of keys and values [B, H, N, D]; a place outside 0 .. N is left out."""
    for lane, at in enumerate(place.tolist()):
        if 0 <= at < keys.shape[2]:
            keys[lane, :, at], values[lane, :, at] = newest[0][lane], newest[1][lane]
