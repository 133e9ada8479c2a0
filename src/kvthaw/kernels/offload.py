"""Copy a few rows of all heads to a block in pinned host memory with one kernel.

Each head's rows are a short piece of the block. A copy engine needs one copy per head, 5 us of host time each, for 8 KiB. H n
rows cross the bus once: 64 KiB for 16 tokens of 8 heads, D = 128, bf16, 1.2 us at 55 GB/s.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON

MOST = 4096
"""Token count from which copy engines are faster: one copy per head is long enough then, and overlaps with kernels."""


def definition(rows: Tensor, block: Tensor, offset: int) -> None:
    """Copy stored rows [H, n, *tail] to block[:, offset : offset + n] of a host block [H, E, *tail]."""
    block[:, offset : offset + rows.shape[1]] = rows.to(block.device)


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["count", "offset"])  # else values such as 1 get kernels of their own
    def _offload(rows, block, count, head_stride, block_stride, offset, width, ROWS: tl.constexpr, WP: tl.constexpr):
        # Program (tile of rows, head) copies 32-bit words.
        i, h = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1).to(tl.int64)
        word = tl.arange(0, WP)
        inside = (i < count)[:, None] & (word < width)[None, :]
        words = tl.load(rows + h * head_stride + i[:, None] * width + word[None, :], mask=inside)
        tl.store(block + h * block_stride + (offset + i[:, None]) * width + word[None, :], words, mask=inside)


def offload(rows: Tensor, block: Tensor, offset: int) -> None:
    """Launch the kernel: as `definition`, on the rows' current stream, without a sync.

    rows: each head contiguous.
    block: contiguous, pinned if the rows are on a GPU. Its tail is [2, D], or the stored form of a row of 8 bits. The size
        of a row is a multiple of 4 bytes.
    """
    heads, count, *tail = rows.shape
    row_bytes = math.prod(tail) * rows.element_size()
    assert rows[:1].is_contiguous() and block.is_contiguous()
    assert (rows.dtype, heads, *tail) == (block.dtype, block.shape[0], *block.shape[2:]) and 0 <= offset <= block.shape[
        1
    ] - count
    assert row_bytes % 4 == 0, "rows are copied in 32-bit words"
    assert block.is_pinned() or block.is_cuda or not rows.is_cuda, "a kernel writes device or pinned memory only"
    width, tile = row_bytes // 4, 16
    source, target = rows.view(torch.int32), block.view(torch.int32)
    _offload[(triton.cdiv(count, tile), heads)](
        source, target, count, source.stride(0), target.stride(0), offset, width, ROWS=tile, WP=triton.next_power_of_2(width)
    )
