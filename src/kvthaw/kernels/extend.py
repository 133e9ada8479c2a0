"""Append new tokens to the unit tables of all layers and sequences in one launch.

The kernel writes keys, positions, ends of units, and the digests of units that the tokens start or fill. It copies n D
elements per head and reads at most one more unit. That is 64 KiB per sequence and layer for 16 tokens of 8 heads, D = 128,
bf16: 0.02 us at 4.3 TB/s. Its time is therefore the launch's, once whenever tokens leave the ring buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON, page_bounds
from kvthaw.kernels.gpu import by_device
from kvthaw.kernels.page_bounds import Spread


class Destination(NamedTuple):
    """Where the new tokens of a sequence go: after `kept` tokens of the current batch, which starts at `begin` in the order and
    at unit `before`."""

    seq: int
    kept: int
    begin: int
    before: int


class Tables(NamedTuple):
    """Tables of all sequences.

    recent [B, H, L, D]: keys of the last tokens, place t of the order at t modulo L. stops [B, H, U + 1] int32: ends of the
    units. counts [B] int32: number of units. order [B, H, T] int32 or None: positions of the tokens. digests [B, H, U, E] or
    None if computed elsewhere.
    """

    recent: Tensor
    stops: Tensor
    counts: Tensor
    order: Tensor | None
    digests: Tensor | None


class Added(NamedTuple):
    """Keys [R, H, n, D] to append to the tables of a layer, the last n tokens of R sequences."""

    keys: Tensor
    tables: Tables


def means(keys: Tensor, size: int) -> Tensor:
    """Average every `size` keys of [H, n, D] in float32; the last group may be smaller. Returns [H, ceil(n / size), D]."""
    full = keys.shape[1] // size * size
    parts = [keys[:, :full].unflatten(1, (-1, size)).mean(dim=2, dtype=torch.float32)] if full else []
    if full < keys.shape[1]:
        parts.append(keys[:, full:].mean(dim=1, keepdim=True, dtype=torch.float32))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def definition(
    every: Sequence[Added], places: Sequence[Destination], *, size: int, first: int, spread: Spread | None = None
) -> None:
    """Append keys [R, H, n, D], one batch row per entry of places, to the tables of each layer; kept + n is at most L.

    Units have `size` tokens, the last one possibly fewer, and continue across batches. `stops` receives the ends of the
    units that are started or filled, `counts` the number of units. `order` receives the positions of the new tokens: place
    t holds position first + t until units are reordered. `digests` receives the means of these units' keys, or their
    bounding boxes (`page_bounds`) if spread is given.
    """
    for keys, tables in every:
        ring = tables.recent.shape[2]
        for new, (seq, kept, begin, before) in zip(keys, places, strict=True):
            n, whole = kept + new.shape[1], kept // size
            units, device = -(-n // size), keys.device
            at = torch.arange(begin + whole * size, begin + n, device=device) % ring
            recent = tables.recent[seq].index_copy_(1, at[kept - whole * size :], new)
            ends = torch.arange(whole * size, (units + 1) * size, size, dtype=torch.int32, device=device).clamp_(max=n) + begin
            tables.stops[seq, :, before + whole : before + units + 1] = ends
            tables.counts[seq] = before + units
            if tables.order is not None:
                there = torch.arange(begin + kept, begin + n, dtype=torch.int32, device=device)
                tables.order[seq, :, begin + kept : begin + n] = there + first
            if tables.digests is not None:
                unit_keys = recent[:, at]
                made = means(unit_keys, size) if spread is None else page_bounds.definition(unit_keys, size, spread=spread)
                tables.digests[seq, :, before + whole : before + units] = made.to(tables.digests.dtype)


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.page_bounds import box

    @triton.jit(do_not_specialize=["count", "new", "first", "ring"])
    def _extend(
        numbers, like, count, new, dim, heads, ring, size, first, grown, key_seq, key_head, key_token,
        PAGE: tl.constexpr, DP: tl.constexpr, MAPPED: tl.constexpr, MEAN: tl.constexpr, BOX: tl.constexpr, MAX: tl.constexpr,
    ):  # fmt: skip
        # Program (unit, counted from the first that is not full; head; sequence of a layer). numbers: the places, then of each
        # layer the addresses of keys and tables, and how many units, places and digests' elements a head has.
        h, pair = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
        r, layer = pair % count, numbers + 4 * count + 9 * (pair // count)
        seq, kept = tl.load(numbers + 4 * r), tl.load(numbers + 4 * r + 1)
        begin, before = tl.load(numbers + 4 * r + 2), tl.load(numbers + 4 * r + 3)
        row, total, unit = seq * heads + h, kept + new, kept // size + tl.program_id(0)
        start = unit * size
        if start < total:
            keys, recent = tl.load(layer).to(like.dtype), tl.load(layer + 1).to(like.dtype)
            stop = tl.minimum(start + size, total)
            i, d = tl.arange(0, PAGE), tl.arange(0, DP)
            t = start + i
            inside = t < stop
            is_new = inside & (t >= kept)
            wide = d < dim
            place = recent + (row * ring + (begin + t) % ring)[:, None] * dim + d[None, :]
            source = keys + r * key_seq + h * key_head + (t - kept)[:, None] * key_token + d[None, :]
            come = tl.load(source, mask=is_new[:, None] & wide[None, :], other=0.0)
            there = tl.load(place, mask=(inside & (t < kept))[:, None] & wide[None, :], other=0.0)
            tl.store(place, come, mask=is_new[:, None] & wide[None, :])
            if MAPPED:
                order = tl.load(layer + 4).to(tl.pointer_type(tl.int32)) + row * tl.load(layer + 7)
                tl.store(order + begin + t, (first + begin + t).to(tl.int32), mask=is_new)
            end = tl.load(layer + 2).to(tl.pointer_type(tl.int32)) + row * tl.load(layer + 6) + before + unit
            tl.store(end, (begin + start).to(tl.int32))  # unchanged, except for the first unit of a sequence
            tl.store(end + 1, (begin + stop).to(tl.int32))
            if (h == 0) & (stop == total):
                tl.store(tl.load(layer + 3).to(tl.pointer_type(tl.int32)) + seq, (before + unit + 1).to(tl.int32))
            if MEAN | BOX:
                k = tl.where(is_new[:, None], come, there).to(tl.float32)
                kind = like.dtype.element_ty
                digest = tl.load(layer + 5).to(like.dtype) + row * tl.load(layer + 8)
                digest += (before + unit) * (2 * dim if BOX else dim) + d
                members = (stop - start).to(tl.float32)
                if BOX:
                    centre, delta = box(k, inside[:, None] & wide[None, :], wide, members, grown, kind, MAX)
                    tl.store(digest, centre.to(kind), mask=wide)
                    tl.store(digest + dim, delta.to(kind), mask=wide)
                else:
                    tl.store(digest, (tl.sum(k, axis=0) / members).to(kind), mask=wide)


def launch(
    every: Sequence[Added], places: Sequence[Destination], *, size: int, first: int, spread: Spread | None = None
) -> None:
    """Launch the Triton kernel; arguments as in `definition`.

    The elements of a key are contiguous, as are all tables. Keys of all layers have the same layout.
    """
    like, (recent, *_, mapped, made) = every[0].keys, every[0].tables
    (rows, heads, new, dim), numbers = like.shape, [number for place in places for number in place]
    most = max(place.before + -(-(place.kept + new) // size) for place in places)
    for keys, tables in every:
        assert keys.stride(3) == 1 and (keys.shape, keys.stride(), keys.dtype) == (
            like.shape,
            like.stride(),
            tables.recent.dtype,
        )
        assert all(table is None or table.is_contiguous() for table in tables) and len(places) == rows
        assert max(place.kept for place in places) + new <= tables.recent.shape[2] == recent.shape[2], "no room for the keys"
        stops, order, digests = tables.stops.shape[2], 0, 0
        if tables.digests is not None:
            digests, units = tables.digests.stride(1), tables.digests.shape[2]
            assert (tables.digests.dtype, tables.digests.shape[3]) == (keys.dtype, dim if spread is None else 2 * dim), (
                "other digests"
            )
            assert most <= units, "no room for the units"
        if tables.order is not None:
            order = tables.order.shape[2]
            assert max(p.begin + p.kept for p in places) + new <= order, "no room in the map"
        assert most < stops, "no room for the units"
        numbers += [0 if each is None else each.data_ptr() for each in (keys, *tables)] + [stops, order, digests]
    page, dp = triton.next_power_of_2(size), triton.next_power_of_2(dim)
    _extend[(triton.cdiv(new, size) + 1, heads, rows * len(every))](
        torch.tensor(numbers).to(like.device, non_blocking=True), recent,
        rows, new, dim, heads, recent.shape[2], size, first, 1 + torch.finfo(like.dtype).eps, *like.stride()[:3],
        PAGE=page, DP=dp, MAPPED=mapped is not None, MEAN=made is not None and spread is None,
        BOX=made is not None and spread is not None, MAX=spread == "max", num_warps=4 if page * dp <= 1 << 14 else 8,
    )  # fmt: skip


extend = by_device(launch, definition)
