"""Rows on their way to the frozen part: a few tokens of all heads, written to pinned host memory by one kernel.

What leaves a ring is a short piece of every head's part of an extent; a copy engine needs a copy a head, 5 us of the host each, for
8 KiB. H n rows cross the bus once: 64 KiB for 16 tokens of 8 heads, d = 128, bf16, 1.2 us at 55 GB/s.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON

MOST = 4096
"""Tokens from which on copy engines are better: a copy a head is long enough then, and goes beside kernels."""


def definition(rows: Tensor, extent: Tensor, offset: int) -> None:
    """Copy rows [H, n, 2, D] to extent[:, offset : offset + n], [H, E, 2, D] on the host."""
    extent[:, offset : offset + rows.shape[1]] = rows.to(extent.device)


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["count", "offset"])  # else some of their values are compiled for
    def _offload(rows, extent, count, head_stride, extent_stride, offset, width, ROWS: tl.constexpr, WP: tl.constexpr):
        # One program a (block of rows; head), in 32-bit words.
        i, h = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1).to(tl.int64)
        word = tl.arange(0, WP)
        inside = (i < count)[:, None] & (word < width)[None, :]
        words = tl.load(rows + h * head_stride + i[:, None] * width + word[None, :], mask=inside)
        tl.store(extent + h * extent_stride + (offset + i[:, None]) * width + word[None, :], words, mask=inside)


def offload(rows: Tensor, extent: Tensor, offset: int) -> None:
    """As `definition`, on the rows' current stream, without a sync. rows: the n tokens of a head neighbour each other; extent
    contiguous, pinned where rows are on a GPU. A row is whole 32-bit words."""
    heads, count = rows.shape[:2]
    row_bytes = 2 * rows.shape[3] * rows.element_size()
    assert rows.stride()[1:] == (2 * rows.shape[3], rows.shape[3], 1) and extent.is_contiguous()
    assert rows.dtype == extent.dtype and extent.shape[0] == heads and 0 <= offset <= extent.shape[1] - count
    assert row_bytes % 4 == 0, "rows are copied in 32-bit words"
    assert extent.is_pinned() or not rows.is_cuda, "a kernel writes pinned memory only"
    width, block = row_bytes // 4, 16
    _offload[(triton.cdiv(count, block), heads)](
        rows.view(torch.int32),
        extent.view(torch.int32),
        count,
        rows.stride(0) * rows.element_size() // 4,
        extent.stride(0) * extent.element_size() // 4,
        offset,
        width,
        ROWS=block,
        WP=triton.next_power_of_2(width),
    )
