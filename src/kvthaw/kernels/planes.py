"""Bit planes of the query's coarse coordinates, which signs.py multiplies by the signs of keys.

Each coordinate of the rotated query is rounded to a third of their root mean square, -8 to 7, four bits in two's complement.
The error is a tenth of the estimate of q.k from a random key's signs, whose own error is three quarters of q.k. A plane holds
one of the four bits of all coordinates; one tensor-core product counts the bits that a key and a plane share.

The layout is that of the product's operand: two blocks of eight columns per four heads. The first block holds each head's
lowest two bits, the second its highest two. Each has one column for the lower bit and one for the upper. If there are fewer
heads they repeat up to four, which changes no maximum.

Bytes and operations, 32 query heads, d = 128: 8 KB of queries, 4 KB of planes; the latency is a chain of load, sum and store.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.chain import dependent
from kvthaw.kernels.encode import SUB
from kvthaw.kernels.query import Rotated, empty_rotated, in_bytes, rotate_queries
from kvthaw.kernels.srht import Rotation

PLANES = 4
STEPS = 3.0
"""Quantization steps per root mean square of the coordinates."""
WIDE = 16
"""Subspaces per bit product."""
WARPS = 4


def coarse(values: Tensor) -> Tensor:
    """Round rotated queries [L, H, P, 8, B] to integers -8 .. 7, int32. 0 for a zero query."""
    length: Tensor = values.flatten(3).norm(dim=3)[..., None, None]
    unit = torch.where(length > 0, length, 1.0) / math.sqrt(values.shape[3] * values.shape[4])
    top = 1 << (PLANES - 1)
    return torch.floor(values * STEPS / unit + 0.5).clamp(-top, top - 1).int()


def pack(numbers: Tensor) -> Tensor:
    """Pack [L, H, P, 8, B] int32, -8 .. 7, into planes [L, H, S, 2, 8, R] uint8.

    S groups of four heads; R >= B, a multiple of WIDE. In block k, bit j of byte b of column 2 h + i is bit 2 k + i of head
    h. It belongs to coordinate j in subspace b.
    """
    heads, subs = numbers.shape[2], numbers.shape[4]
    head = torch.arange(-(-heads // 4) * 4, device=numbers.device) % heads
    bit = (numbers[:, :, head, None] >> torch.arange(PLANES, device=numbers.device)[:, None, None]) & 1
    byte = (bit << torch.arange(SUB, device=numbers.device)[:, None]).sum(dim=4).to(torch.uint8)  # L, H, 4 S, planes, B
    byte = torch.nn.functional.pad(byte, (0, -subs % WIDE))
    packed: Tensor = byte.unflatten(3, (2, 2)).unflatten(2, (-1, 4)).transpose(3, 4).flatten(4, 5)
    return packed.contiguous()


def unpack(planes: Tensor, subs: int) -> Tensor:
    """Unpack planes [L, H, S, 2, 8, R] in the first `subs` subspaces: [L, H, 4 S, 8, B] int32."""
    byte: Tensor = planes[..., :subs].unflatten(4, (4, 2)).transpose(3, 4).flatten(4, 5).flatten(2, 3)
    bit = (byte.int()[:, :, :, :, None] >> torch.arange(SUB, device=planes.device)[:, None]) & 1
    worth = torch.arange(PLANES, device=planes.device)[:, None, None]
    number = (bit << worth).sum(dim=3)  # no copy from the host, so that graphs can capture it
    return (number - 2 * (number & 1 << PLANES - 1)).int()


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.chain import follow
    from kvthaw.kernels.query import mean_of, store_rotated

    @triton.jit
    def _store_planes(planes, y, unit, pair, p, b, COLUMNS: tl.constexpr, P: tl.constexpr, SUBS: tl.constexpr, ROW: tl.constexpr,
                    STEPS: tl.constexpr):  # fmt: skip
        # Store the 8 coordinates y of subspace b of head p in all of its columns. Bytes without a subspace are 0.
        number = tl.floor(y * tl.where(unit > 0, STEPS / tl.where(unit > 0, unit, 1.0), 0.0) + 0.5)
        number = tl.minimum(tl.maximum(number, -8.0), 7.0).to(tl.int32)
        k = tl.arange(0, 4)
        bit = (number[None, :] >> k[:, None]) & 1
        byte = tl.sum(bit << tl.arange(0, 8)[None, :], axis=1).to(tl.uint8)
        for first in tl.static_range(0, COLUMNS, P):
            column = first + p
            if column < COLUMNS:
                at = planes + ((((pair * (COLUMNS // 4) + column // 4) * 2 + k // 2) * 4 + column % 4) * 2 + k % 2) * ROW
                tl.store(at + b, byte)
                for rest in tl.static_range(SUBS, ROW, SUBS):
                    tl.store(at + rest + b, tl.zeros((4,), tl.uint8))

    @triton.jit
    def _planes(query, basis, values, whole_values, factors, planes, totals, scale, dim, GROUP: tl.constexpr, P: tl.constexpr,
                SUBS: tl.constexpr, SQUARE: tl.constexpr, BINS: tl.constexpr, COLUMNS: tl.constexpr, ROW: tl.constexpr,
                STEPS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
        # Program: a query head in one subspace. The first program of a KV head clears its score histogram.
        pair = tl.program_id(0)
        b = tl.program_id(1)
        p = tl.program_id(2)
        i = tl.arange(0, SQUARE)
        j = tl.arange(0, 8)
        own = tl.load(basis + i[:, None] * SQUARE + b * 8 + j[None, :]).to(tl.float32)
        follow(PDL)
        if (b == 0) & (p == 0):
            tl.store(totals + pair * BINS + tl.arange(0, BINS), tl.zeros((BINS,), tl.int32))
        x = mean_of(query, pair * GROUP + p * (GROUP // P), i, dim, GROUP // P, SQUARE)
        length = tl.sqrt(tl.sum(x * x))
        y = tl.sum(own * x[:, None], axis=0) * scale
        store_rotated(values, whole_values, factors, y, pair * P + p, b, SUBS)
        _store_planes(planes, y, length * tl.rsqrt(8.0 * SUBS), pair, p, b, COLUMNS, P, SUBS, ROW, STEPS)


def launch(query: Tensor, rotation: Rotation, heads: int, totals: Tensor, *, mean: bool) -> tuple[Rotated, Tensor]:
    """Launch the kernel on any device: rotates and rounds query [L, Hq, d], clears totals [L, H, bins] int32."""
    batch, q_heads, dim = query.shape
    assert query.is_contiguous() and totals.is_contiguous() and totals.dtype == torch.int32
    group, subs, square = q_heads // heads, rotation.padded // SUB, rotation.basis.shape[0]
    scored = 1 if mean else group
    rotated = empty_rotated(batch, heads, scored, subs, query.device)
    fours, row = -(-scored // 4), -(-subs // WIDE) * WIDE
    planes = torch.empty((batch, heads, fours, 2, 8, row), dtype=torch.uint8, device=query.device)
    _planes[(batch * heads, subs, scored)](
        query, rotation.basis, rotated.values, rotated.whole, rotated.factors, planes, totals, rotation.scale, dim, GROUP=group,
        P=scored, SUBS=subs, SQUARE=square, BINS=totals.shape[2], COLUMNS=4 * fours, ROW=row, STEPS=STEPS, num_warps=WARPS,
        **dependent(query.device),
    )  # fmt: skip
    return rotated, planes


def planes(query: Tensor, rotation: Rotation, heads: int, totals: Tensor, *, mean: bool) -> tuple[Rotated, Tensor]:
    """Return rotated queries and their planes [L, H, S, 2, 8, R] uint8 for query [L, Hq, d]; clear totals [L, H, bins] int32."""
    if query.is_cuda and HAS_TRITON:
        return launch(query.contiguous(), rotation, heads, totals, mean=mean)
    rotated = in_bytes(rotate_queries(query, heads, rotation, mean=mean))
    totals.zero_()
    return rotated, pack(coarse(rotated.values))
