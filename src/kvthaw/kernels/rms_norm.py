"""Normalise rows by their root mean square and scale them, in one launch.

transformers computes this with eight launches, which read and write 36 bytes an element of a bfloat16 row; the kernel moves 4. For
16,384 rows of 4,096 that is 0.27 GB and 63 us at 4.3 TB/s, where the launches take 0.56 ms.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.chain import dependent
from kvthaw.kernels.gpu import by_device

_ELEMENTS = 4096  # of a program: several short rows, or one long row
MOST = 16384
"""Elements of the longest row that a program holds."""


def definition(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return weight * x / sqrt(mean(x^2) + eps) for rows x [..., N] and weight [N]. x is divided in float32 and rounded to its
    dtype before the product."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.chain import follow

    @triton.jit(do_not_specialize=["rows"])
    def _rms_norm(out, x, weight, eps, rows, n, ROWS: tl.constexpr, NP: tl.constexpr, PDL: tl.constexpr):
        follow(PDL)
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        column = tl.arange(0, NP)[None, :]
        inside = (row < rows)[:, None] & (column < n)
        at = row[:, None] * n + column
        wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        mean = tl.sum(wide * wide, axis=1) / n
        scaled = (wide * tl.rsqrt(mean + eps)[:, None]).to(x.dtype.element_ty)
        by = tl.load(weight + column, mask=column < n, other=0.0)
        tl.store(out + at, (by.to(tl.float32) * scaled.to(tl.float32)).to(out.dtype.element_ty), mask=inside)


def launch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Launch the Triton kernel; arguments and result as in `definition`, for contiguous x and rows of at most MOST elements."""
    n = x.shape[-1]
    assert x.is_contiguous() and weight.is_contiguous() and weight.shape == (n,) and n <= MOST
    out = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype), device=x.device)
    rows, width = x.numel() // max(1, n), triton.next_power_of_2(n)
    if rows:
        each = max(1, _ELEMENTS // width)
        _rms_norm[(triton.cdiv(rows, each),)](
            out, x, weight, eps, rows, n, ROWS=each, NP=width, num_warps=8 if width >= _ELEMENTS else 4, **dependent(x.device)
        )  # fmt: skip
    return out


rms_norm = by_device(launch, definition)
