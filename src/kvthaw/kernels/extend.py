"""New tokens enter a lane's tables of units: their keys, their places in the map and where their units end, in one launch.

n D keys a head are copied (64 KiB for 16 tokens of 8 heads, d = 128, bf16: 0.02 us at 4.3 TB/s), so the time is the launch's; the
same in torch is nine launches, which every layer pays whenever tokens leave the ring.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON


class Place(NamedTuple):
    """Where a batch of tokens stands, of which `kept` are there already: it begins at `begin` in the map and at unit `before`; its
    units have `size` tokens, the last one maybe fewer. Place t of the map holds position first + t until units change it."""

    kept: int
    begin: int
    before: int
    size: int
    first: int


def definition(keys: Tensor, recent: Tensor, stops: Tensor, count: Tensor, order: Tensor | None, place: Place) -> None:
    """Add keys [H, n, D] behind those kept in recent [H, batch, D], where they fit.

    stops [H, U + 1] int32 gets the ends of the batch's units, count (one int32) the number of all units, order [H, T] int32, where
    there is one, the new tokens' positions.
    """
    kept, begin, before, size, first = place
    n = kept + keys.shape[1]
    recent[:, kept:n] = keys
    units = -(-n // size)
    ends = (torch.arange(1, units + 1, device=keys.device) * size).clamp(max=n) + begin
    stops[:, before] = begin
    stops[:, before + 1 : before + units + 1] = ends.int()
    count.fill_(before + units)
    if order is not None:
        new = torch.arange(begin + kept, begin + n, dtype=torch.int32, device=keys.device)
        order[:, begin + kept : begin + n] = new + first


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["new", "kept", "begin", "before", "first"])  # else some of their values are compiled for
    def _extend(
        keys, recent, stops, count, order,
        new, dim, key_head, key_token, recent_head, stops_head, order_head,
        kept, begin, before, size, first,
        TILE: tl.constexpr, DP: tl.constexpr, MAPPED: tl.constexpr,
    ):  # fmt: skip
        # One program a (tile of new tokens; head). The head's first program writes the batch's ends, its units being no more
        # than its tokens; the first of all writes the count.
        h, d = tl.program_id(1).to(tl.int64), tl.arange(0, DP)
        i = tl.program_id(0) * TILE + tl.arange(0, TILE)
        known, inside = i < new, d < dim
        both = known[:, None] & inside[None, :]
        rows = tl.load(keys + h * key_head + i[:, None] * key_token + d[None, :], mask=both)
        tl.store(recent + h * recent_head + (kept + i[:, None]) * dim + d[None, :], rows, mask=both)
        if MAPPED:
            place = begin + kept + i
            tl.store(order + h * order_head + place, first + place, mask=known)
        if tl.program_id(0) == 0:
            total = kept + new
            units = (total + size - 1) // size
            end = stops + h * stops_head + before
            tl.store(end, begin)
            for start in range(0, units, TILE):
                u = start + tl.arange(0, TILE)
                tl.store(end + 1 + u, begin + tl.minimum((u + 1) * size, total), mask=u < units)
            if h == 0:
                tl.store(count, before + units)


def launch(keys: Tensor, recent: Tensor, stops: Tensor, count: Tensor, order: Tensor | None, place: Place) -> None:
    """The Triton kernel; arguments as in `definition`. Of a key the elements neighbour each other."""
    heads, new, dim = keys.shape
    kept, begin, before, size, _ = place
    assert keys.stride(2) == 1 and recent.stride()[1:] == (dim, 1) and stops.stride(1) == 1
    assert keys.dtype == recent.dtype and kept + new <= recent.shape[1]
    assert before + -(-(kept + new) // size) < stops.shape[1], "no room for the units"
    assert order is None or (order.stride(1) == 1 and begin + kept + new <= order.shape[1]), "no room in the map"
    tile = 32
    _extend[(triton.cdiv(new, tile), heads)](
        keys, recent, stops, count, stops if order is None else order,
        new, dim, keys.stride(0), keys.stride(1), recent.stride(0), stops.stride(0), 0 if order is None else order.stride(0),
        *place,
        TILE=tile, DP=triton.next_power_of_2(dim), MAPPED=order is not None,
    )  # fmt: skip


def extend(keys: Tensor, recent: Tensor, stops: Tensor, count: Tensor, order: Tensor | None, place: Place) -> None:
    """As `definition`: the kernel on a GPU, torch elsewhere."""
    step = launch if HAS_TRITON and keys.device.type == "cuda" else definition
    step(keys, recent, stops, count, order, place)
