"""The query in the coordinates of the keys' summaries, as it is and in bytes: what votes and estimates are made of.

In bytes the 8 coordinates of a subspace are whole multiples of a power of two, the least that brings them into -127 .. 127. That
errs by half a percent of a coordinate where a key's 4-bit code errs by nine, and no subspace's rounding depends on another's, so
that the kernels which rotate a query, a program a subspace, round it in passing.
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
    """Rotated queries of L lanes, H KV heads, P heads each, B subspaces.

    values [L, H, P, 8, B] float32. whole [L, H, P, B, 8] int8, to be multiplied by factors [L, H, P, B] float32, powers of two,
    or 0 where all eight are."""

    values: Tensor
    whole: Tensor
    factors: Tensor

    def rounded(self) -> Tensor:
        """The rotated queries that estimates see, [L, H, P, B, 8] float32."""
        return self.whole.float() * self.factors[..., None]


def rotate_queries(query: Tensor, heads: int, rotation: Rotation, *, mean: bool) -> Tensor:
    """query [L, Hq, d] -> [L, H, P, 8, B] float32: coordinate j of subspace b, P = G heads, or 1 with mean=True (their
    mean)."""
    grouped = query.float().reshape(query.shape[0], heads, -1, query.shape[2])
    if mean:
        grouped = grouped.mean(dim=2, keepdim=True)
    y = srht(grouped, rotation)
    return y.reshape(*y.shape[:3], -1, SUB).transpose(3, 4).contiguous()


def in_bytes(values: Tensor) -> Rotated:
    """Rotated queries [L, H, P, 8, B] float32 with their roundings."""
    y = values.transpose(3, 4)
    bits = (y.abs().amax(dim=4) * (1 / 127)).view(torch.int32)
    factors = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)  # the next power of two
    whole = y * torch.where(factors > 0, 1 / factors, 0.0)[..., None]
    return Rotated(values, torch.floor(whole + 0.5).to(torch.int8).contiguous(), factors.contiguous())


def room(lanes: int, heads: int, scored: int, subs: int, device: torch.device) -> Rotated:
    """Rotated queries for a kernel to fill."""
    shape = lanes, heads, scored
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
        # The mean of the COUNT query heads from the first on, places i of SQUARE, 0 beyond dim.
        x = tl.zeros((SQUARE,), tl.float32)
        for g in tl.static_range(COUNT):
            x += tl.load(query + (first + g) * dim + i, mask=i < dim, other=0.0).to(tl.float32)
        return x / COUNT

    @triton.jit
    def put(values, whole, factors, y, head, b, SUBS: tl.constexpr):
        # Store the 8 coordinates y of subspace b of a head, counted over all, as they are and in bytes.
        j = tl.arange(0, 8)
        bits = (tl.max(tl.abs(y)) * (1 / 127)).to(tl.int32, bitcast=True)
        factor = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        back = tl.where(factor > 0, 1.0 / tl.where(factor > 0, factor, 1.0), 0.0)
        tl.store(values + (head * 8 + j) * SUBS + b, y)
        tl.store(whole + (head * SUBS + b) * 8 + j, tl.floor(y * back + 0.5).to(tl.int8))
        tl.store(factors + head * SUBS + b, factor)
