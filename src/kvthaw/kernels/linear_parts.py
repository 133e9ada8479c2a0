"""What the kernels of linear layers of one token share: how they divide weights, and what follows a product."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.split import multiprocessors


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a kernel divides its weights.

    rows, width: rows and columns that a program loads at once, powers of two. For weights of 4 bits rows are pairs of rows of
    tiles, 1 or 2.
    programs: programs per multiprocessor.
    warps: warps of a program.
    """

    rows: int
    width: int
    programs: int
    warps: int

    def launched(self, total: int, device: torch.device) -> int:
        """Return how many programs share `total` blocks. Under the interpreter they are few, so that each takes several."""
        return min(total, self.programs * (multiprocessors(device) if device.type == "cuda" else 2))


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.gated import multiplied

    @triton.jit
    def part(block, x0, x1, x2, n0, n1, n2, end0, end1, PARTS: tl.constexpr):
        # The tensor that belongs to a block's weight, the rows of that weight, and its first block.
        x, n, start = x0, n0, end0 * 0
        if PARTS > 1 and block >= end0:
            x, n, start = x1, n1, end0
        if PARTS > 2 and block >= end1:
            x, n, start = x2, n2, end1
        return x, n, start

    @triton.jit
    def biased(y, bias, row, n, kind: tl.constexpr, BIAS: tl.constexpr):
        # Products plus their bias, rounded to `kind`.
        if BIAS:
            y += tl.load(bias + row, mask=row < n, other=0.0).to(tl.float32)
        return y.to(kind)

    @triton.jit
    def turned(y, row, cos, sin, straight, HALF: tl.constexpr):
        # Pairs of rounded products of a head's dimensions, turned by the token's position unless straight. Products and sums are
        # rounded as separate operations round them.
        kind: tl.constexpr = y.dtype
        angle = row % (2 * HALF)
        by_cos = (y.to(tl.float32) * tl.load(cos + angle).to(tl.float32)).to(kind).to(tl.float32)
        low, high = tl.split(tl.reshape(y.to(tl.float32), (y.shape[0] // 2, 2)))
        other = tl.reshape(tl.join(-high, low), (y.shape[0],))
        by_sin = (other * tl.load(sin + angle).to(tl.float32)).to(kind).to(tl.float32)
        return tl.where(straight, y, (by_cos + by_sin).to(kind))

    @triton.jit
    def finish(y, up, out, residual, row, n, GATED: tl.constexpr, SILU: tl.constexpr, ADD: tl.constexpr):
        # Store rounded products y of rows, times `up` after the activation if GATED, plus the residual if ADD.
        kind = out.dtype.element_ty
        if GATED:
            y = multiplied(y.to(tl.float32), up.to(tl.float32), kind, SILU).to(kind)
        if ADD:
            y = (tl.load(residual + row, mask=row < n, other=0.0).to(tl.float32) + y.to(tl.float32)).to(kind)
        tl.store(out + row, y, mask=row < n)
