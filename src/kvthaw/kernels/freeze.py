"""Rows on their way from the rings to the frozen part: what leaves the rings of all lanes goes to pinned host memory by one kernel.

R lanes give H n rows each, which cross the bus once: 64 KiB a lane for 16 tokens of 8 heads, d = 128, bf16. 24 lanes are 1.6 MB,
31 us at 50 GB/s; a launch a lane would take the host 24 times 5 to 20 us.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.places import place_of

Span = tuple[int, int, int]
"""A lane, its first position, and how many tokens."""


def definition(
    slab: Tensor, extents: Sequence[Sequence[Tensor]], extent: int, spans: Sequence[Span], *, sink: int, ring: int
) -> None:
    """Copy each span's rows from their places in sink and ring of the slab [B, H, N, 2, D] to those on the host: row t of lane b is
    extents[b][t // extent][:, t % extent]."""
    for lane, start, count in spans:
        row = torch.arange(start, start + count, device=slab.device)
        rows = slab[lane].index_select(1, place_of(row, sink, ring))
        while rows.shape[1]:
            number, offset = divmod(start, extent)
            some, rows = rows[:, : extent - offset], rows[:, extent - offset :]
            extents[lane][number][:, offset : offset + some.shape[1]].copy_(some, non_blocking=True)
            start += some.shape[1]


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["sink", "ring", "table_stride"])
    def _freeze(
        spans, slab, table, extent, width, sink, ring, table_stride, lane_stride, head_stride,
        BLOCK: tl.constexpr, ALIGN: tl.constexpr,
    ):  # fmt: skip
        # One program a (token, head, lane): 2 D contiguous elements, as 32-bit words, from their place to the host.
        i, h, span = tl.program_id(0), tl.program_id(1).to(tl.int64), spans + 3 * tl.program_id(2)
        lane = tl.load(span).to(tl.int64)
        if i < tl.load(span + 2):
            row = tl.load(span + 1) + i
            place = tl.where(row < sink, row, sink + (row - sink) % ring).to(tl.int64)
            base = tl.load(table + lane * table_stride + row // extent).to(tl.pointer_type(tl.int32))
            target = tl.multiple_of(base + (h * extent + row % extent) * width, ALIGN)  # which no address from memory tells
            source = slab + lane * lane_stride + h * head_stride + place * width
            for start in range(0, width, BLOCK):
                words = start + tl.arange(0, BLOCK)
                inside = words < width
                tl.store(target + words, tl.load(source + words, mask=inside), mask=inside)


def freeze(slab: Tensor, table: Tensor, extent: int, spans: Tensor, most: int, *, sink: int, ring: int) -> None:
    """As `definition`, on the slab's current stream, without a sync. slab contiguous; table [B, extents] int64: addresses of the
    extents, pinned where the slab is on a GPU; spans [R, 3] int32, none of more than `most` tokens; both where the slab is."""
    assert slab.is_contiguous() and table.stride(1) == 1 and spans.is_contiguous()
    assert spans.dtype == torch.int32 and table.dtype == torch.int64
    row_bytes = 2 * slab.shape[4] * slab.element_size()
    assert row_bytes % 4 == 0, "rows are copied in 32-bit words"
    width, words = row_bytes // 4, slab.view(torch.int32)
    block = min(1024, 1 << (width - 1).bit_length())
    _freeze[(most, slab.shape[1], len(spans))](
        spans, words, table, extent, width, sink, ring, table.stride(0), words.stride(0), words.stride(1),
        BLOCK=block, ALIGN=16 if row_bytes % 16 == 0 else 4, num_warps=1 if block <= 256 else 4,
    )  # fmt: skip
