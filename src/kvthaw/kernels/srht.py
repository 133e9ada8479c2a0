"""Subsampled randomized Hadamard transform: the rotation R = H D / sqrt(d) (ParisKV, section 4.1.1, step 1).

D is a diagonal of random signs, H the Walsh-Hadamard matrix. R spreads a vector evenly over its coordinates and preserves inner
products, so equally rotated keys and queries keep their scores. A head_dim d that is not a power of two is zero-padded to the
next, d'.

Bytes and operations for 8 x 128k keys of 128 bf16: 268 MB read. The fast transform takes 7 x 128 additions and 7 x 128
shuffles per key (0.9 G each). The product with the matrix of signs takes 2 x 128 x 128 operations per key: 34 G, 0.05 ms on
the tensor cores of an H200. That is below the 0.06 ms of the reads. Each product is exact, because the entries are +-1. So
the kernel that encodes keys multiplies. Float32 vectors are multiplied as three bfloat16 parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotation from head_dim to padded coordinates: y = scale * x @ basis.

    basis [N, N] int8 with entries +-1 or 0, N = max(16, padded): rows from head_dim on and columns from padded on are 0.
    """

    head_dim: int
    padded: int
    scale: float
    basis: Tensor


def padded(dim: int) -> int:
    """Return the next power of two, at least 8."""
    return max(8, 1 << (dim - 1).bit_length())


def signs(dim: int, seed: int) -> Tensor:
    """Return the diagonal of D for padded(dim) coordinates: +-1 in int8, the same on every machine for a seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (padded(dim),), generator=generator, dtype=torch.int8) * 2 - 1


def make_rotation(dim: int, seed: int, *, device: torch.device | str = "cpu") -> Rotation:
    """Make the rotation for a seed."""
    width = padded(dim)
    square = max(16, width)
    basis = torch.zeros((square, square), dtype=torch.int8)
    i = torch.arange(width)
    both = i[:, None] & i[None, :]
    parity = sum(((both >> bit) & 1 for bit in range(width.bit_length())), torch.zeros_like(both)) % 2
    basis[:dim, :width] = (signs(dim, seed)[:, None] * (1 - 2 * parity).to(torch.int8))[:dim]
    return Rotation(dim, width, width**-0.5, basis.to(device))


def srht(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate vectors [..., d] of any float dtype to [..., d'] float32."""
    basis = rotation.basis[: rotation.head_dim, : rotation.padded].float()
    y: Tensor = x.float() @ basis * rotation.scale
    return y


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def rotate_tile(x, matrix, UPCAST: tl.constexpr):
        """Multiply a tile [n, SQUARE] of vectors by a matrix of +-1 and 0, unscaled, with float32 accumulation.

        matrix has the dtype of x, or bfloat16 if that is float32: x is then split exactly into three bfloat16 terms.
        """
        if x.dtype == tl.float32:
            high = x.to(tl.bfloat16)
            rest = x - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            if UPCAST:
                high, middle, low = high.to(tl.float32), middle.to(tl.float32), low.to(tl.float32)
                matrix = matrix.to(tl.float32)
            y = tl.dot(high, matrix, tl.dot(middle, matrix, tl.dot(low, matrix)))
        elif UPCAST:
            y = tl.dot(x.to(tl.float32), matrix.to(tl.float32))
        else:
            y = tl.dot(x, matrix)
        return y
