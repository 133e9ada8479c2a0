"""Copy the rows that leave the ring buffers of all sequences to pinned host memory in one kernel.

Each of R sequences gives H n rows, which cross the bus once: 64 KiB per sequence for 16 tokens of 8 heads, D = 128, bf16. 24
sequences are 1.6 MB, 31 us at 50 GB/s; one launch per sequence would cost the host 24 times 5 to 20 us.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.places import place_of
from kvthaw.kernels.row_format import RowFormat, copying

Span = tuple[int, int, int]
"""A sequence, its first position and the number of tokens."""


def definition(
    slab: Tensor,
    blocks: Sequence[Sequence[Tensor]],
    block_size: int,
    spans: Sequence[Span],
    *,
    sink: int,
    ring: int,
    format: RowFormat | None = None,
) -> None:
    """Copy the rows of each span from the sink and ring of the slab [B, H, N, 2, D] to host blocks. Row t of sequence b goes to
    blocks[b][t // block_size][:, t % block_size]. format: of the blocks, None for the slab's; what it rounds is rounded in the
    slab too."""
    for seq, start, count in spans:
        row = torch.arange(start, start + count, device=slab.device)
        place = place_of(row, sink, ring)
        rows = slab[seq].index_select(1, place)
        if format is not None and (stored := format.encode(rows)) is not rows:
            slab[seq].index_copy_(1, place, format.decode(stored))
            rows = stored
        while rows.shape[1]:
            number, offset = divmod(start, block_size)
            some, rows = rows[:, : block_size - offset], rows[:, block_size - offset :]
            blocks[seq][number][:, offset : offset + some.shape[1]].copy_(some, non_blocking=True)
            start += some.shape[1]


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.row_format import copy_words, store_part

    @triton.jit(do_not_specialize=["sink", "ring", "table_stride"])
    def _freeze(
        spans, slab, table, block_size, width, sink, ring, table_stride, seq_stride, head_stride,
        BLOCK: tl.constexpr, ALIGN: tl.constexpr, DIM: tl.constexpr,
    ):  # fmt: skip
        # Program (token, head, sequence) copies 2 D contiguous elements, as 32-bit words; if DIM is given it stores them as e4m3.
        i, h, span = tl.program_id(0), tl.program_id(1).to(tl.int64), spans + 3 * tl.program_id(2)
        seq = tl.load(span).to(tl.int64)
        if i < tl.load(span + 2):
            row = tl.load(span + 1) + i
            place = tl.where(row < sink, row, sink + (row - sink) % ring).to(tl.int64)
            block = tl.load(table + seq * table_stride + row // block_size)
            if DIM is not None:
                target = block + (h * block_size + row % block_size) * width + tl.zeros((1,), tl.int64)
                d = tl.arange(0, BLOCK)
                for part in tl.static_range(2):
                    source = slab + seq * seq_stride + h * head_stride + (2 * place + part) * DIM + d[None, :]
                    x = tl.load(source, mask=(d < DIM)[None, :], other=0.0)
                    rounded = store_part(target, target != 0, x.to(tl.float32), d, part, DIM)
                    tl.store(source, rounded.to(x.dtype), mask=(d < DIM)[None, :])
            else:
                # The compiler cannot infer the alignment of an address that it loads.
                base = block.to(tl.pointer_type(tl.int32))
                target = tl.multiple_of(base + (h * block_size + row % block_size) * width, ALIGN)
                source = slab + seq * seq_stride + h * head_stride + place * width
                copy_words(source, target, width, BLOCK)


def freeze(
    slab: Tensor,
    table: Tensor,
    block_size: int,
    spans: Tensor,
    most: int,
    *,
    sink: int,
    ring: int,
    format: RowFormat | None = None,
) -> None:
    """Launch the kernel: as `definition`, on the slab's current stream, without a sync.

    slab: contiguous. table [B, blocks] int64: addresses of the blocks, pinned if the slab is on a GPU. spans [R, 3] int32, each
    of at most `most` tokens. table and spans are on the slab's device.
    """
    assert slab.is_contiguous() and table.stride(1) == 1 and spans.is_contiguous()
    assert spans.dtype == torch.int32 and table.dtype == torch.int64
    words, width, how = copying(slab, format)
    _freeze[(most, slab.shape[1], len(spans))](
        spans, words, table, block_size, width, sink, ring, table.stride(0), words.stride(0), words.stride(1),
        **how,
    )  # fmt: skip
