"""Fetch selected rows over UVA: a kernel reads them from pinned host memory into their slots (ParisKV, section 4.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON


def definition(table: Tensor, block_size: int, slab: Tensor, fetch: Tensor, slots: Tensor, offset: int) -> None:
    """Copy row fetch[b, h, m] of sequence b to slab[b, h, offset + slots[b, h, m]]; fetch -1 skips.

    table[b][e]: block e of sequence b, a tensor [H, block_size, 2, D]; the launcher takes the blocks' addresses.
    """
    for b, h, m in (fetch >= 0).nonzero().tolist():
        row = int(fetch[b, h, m])
        slab[b, h, offset + int(slots[b, h, m])] = table[b][row // block_size][h, row % block_size].to(slab.device)


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _uva_gather(
        table, fetch, slots, slab, block_size, width, heads, count, offset, table_stride, seq_stride, head_stride,
        BLOCK: tl.constexpr, ALIGN: tl.constexpr,
    ):  # fmt: skip
        # Program (sequence, head, m) copies 2 D contiguous elements, as 32-bit words, from the host to the slot.
        pid = tl.program_id(0).to(tl.int64)
        h = (pid // count) % heads
        b = pid // (count * heads)
        row = tl.load(fetch + pid)
        slot = tl.load(slots + pid)
        if row >= 0:
            base = tl.load(table + b * table_stride + row // block_size).to(tl.pointer_type(tl.int32))
            # The compiler cannot infer the alignment of an address that it loads.
            source = tl.multiple_of(base + (h * block_size + row % block_size) * width, ALIGN)
            target = slab + b * seq_stride + h * head_stride + (offset + slot).to(tl.int64) * width
            for start in range(0, width, BLOCK):
                words = start + tl.arange(0, BLOCK)
                inside = words < width
                tl.store(target + words, tl.load(source + words, mask=inside), mask=inside)


def uva_gather(table: Tensor, block_size: int, slab: Tensor, fetch: Tensor, slots: Tensor, offset: int) -> None:
    """Launch the kernel: as `definition`, on the current stream, without a sync.

    table [B, blocks] int64: addresses of the blocks, on the device. slab [B, H, N, 2, D] contiguous. fetch, slots [B, H, M]
    int32.
    """
    assert slab.is_contiguous() and fetch.is_contiguous() and slots.is_contiguous() and table.is_contiguous()
    assert fetch.dtype == slots.dtype == torch.int32 and table.dtype == torch.int64
    row_bytes = 2 * slab.shape[-1] * slab.element_size()
    assert row_bytes % 4 == 0, "a row is copied in 32-bit words"
    width = row_bytes // 4
    words = slab.view(torch.int32)
    batch, heads, count = fetch.shape
    block = min(1024, 1 << (width - 1).bit_length())
    _uva_gather[(batch * heads * count,)](
        table, fetch, slots, words, block_size, width, heads, count, offset, table.stride(0), words.stride(0), words.stride(1),
        BLOCK=block, ALIGN=16 if row_bytes % 16 == 0 else 4, num_warps=1 if block <= 256 else 4,
    )  # fmt: skip
