"""Rotated queries, in float32 and as bytes, from which votes and estimates are computed.

As bytes, the 8 coordinates of a subspace are integer multiples of a power of two, the smallest that maps them into -127 .. 127.
The rounding error is half a percent of a coordinate, where a key's 4-bit code has nine. Each subspace is rounded independently,
so the kernels that rotate a query, one program per subspace, round it on the way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.encode import SUB
from kvthaw.kernels.srht import Rotation, srht


@dataclass(frozen=True, slots=True)
class Rotated:
    """Rotated queries of L sequences, H KV heads, P query heads per KV head, B subspaces.

    values: [L, H, P, 8, B] float32.
    whole: [L, H, P, B, 8] int8, the same rounded; its scale is factors.
    factors: [L, H, P, B] float32, powers of two, or 0 where all eight coordinates are 0.
    """

    values: Tensor
    whole: Tensor
    factors: Tensor

    def rounded(self) -> Tensor:
        """Return the rounded queries that estimates use, [L, H, P, B, 8] float32."""
        return self.whole.float() * self.factors[..., None]


def rotate_queries(query: Tensor, heads: int, rotation: Rotation, *, mean: bool) -> Tensor:
    """Rotate query [L, Hq, d] -> [L, H, P, 8, B] float32: coordinate j of subspace b. P = G heads, or 1 with mean=True (their
    mean)."""
    grouped = query.float().reshape(query.shape[0], heads, -1, query.shape[2])
    if mean:
        grouped = grouped.mean(dim=2, keepdim=True)
    y = srht(grouped, rotation)
    return y.reshape(*y.shape[:3], -1, SUB).transpose(3, 4).contiguous()


def in_bytes(values: Tensor) -> Rotated:
    """Round rotated queries [L, H, P, 8, B] float32."""
    y = values.transpose(3, 4)
    bits = (y.abs().amax(dim=4) * (1 / 127)).view(torch.int32)
    factors = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)  # round up to a power of two
    whole = y * torch.where(factors > 0, 1 / factors, 0.0)[..., None]
    return Rotated(values, torch.floor(whole + 0.5).to(torch.int8).contiguous(), factors.contiguous())


def empty_rotated(batch: int, heads: int, scored: int, subs: int, device: torch.device) -> Rotated:
    """Allocate rotated queries for a kernel to fill."""
    shape = batch, heads, scored
    return Rotated(
        torch.empty((*shape, SUB, subs), dtype=torch.float32, device=device),
        torch.empty((*shape, subs, SUB), dtype=torch.int8, device=device),
        torch.empty((*shape, subs), dtype=torch.float32, device=device),
    )


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def mean_of(query, first, i, dim, COUNT: tl.constexpr, SQUARE: tl.constexpr):
        # Return the mean of COUNT query heads starting at `first`, at channels i, 0 beyond dim.
        x = tl.zeros((SQUARE,), tl.float32)
        for g in tl.static_range(COUNT):
            x += tl.load(query + (first + g) * dim + i, mask=i < dim, other=0.0).to(tl.float32)
        return x / COUNT

    @triton.jit
    def store_rotated(values, whole, factors, y, head, b, SUBS: tl.constexpr):
        # Store the 8 coordinates y of subspace b of a head (numbered over all sequences), in float32 and as bytes.
        j = tl.arange(0, 8)
        bits = (tl.max(tl.abs(y)) * (1 / 127)).to(tl.int32, bitcast=True)
        factor = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        back = tl.where(factor > 0, 1.0 / tl.where(factor > 0, factor, 1.0), 0.0)
        tl.store(values + (head * 8 + j) * SUBS + b, y)
        tl.store(whole + (head * SUBS + b) * 8 + j, tl.floor(y * back + 0.5).to(tl.int8))
        tl.store(factors + head * SUBS + b, factor)
