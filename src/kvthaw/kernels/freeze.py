"""Copy the rows that leave the ring buffers of all layers and sequences to pinned host memory, and to the device for the indexes.

Each of R sequences gives H n rows a layer, which cross the bus once: 64 KiB for 16 tokens of 8 heads, D = 128, bf16. 30
layers of 24 sequences are 47 MB, 0.94 ms at 50 GB/s. One launch for each of the 720 would cost the host 5 to 20 us each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.places import place_of
from kvthaw.kernels.row_format import RowFormat, copying

Span = tuple[int, int, int, int]
"""A sequence, positions start .. stop that an index takes, and where those begin that are not stored yet, up to the same stop."""


def definition(
    slabs: Sequence[Tensor],
    blocks: Sequence[Sequence[Sequence[Tensor]]],
    block_size: int,
    spans: Sequence[Span],
    rows: Tensor,
    *,
    sink: int,
    ring: int,
    slots: Sequence[int] = (),
    format: RowFormat | None = None,
) -> None:
    """Copy the rows of each span from the sink and ring of L slabs [B, H, N, 2, D] to host blocks and to `rows`.

    Positions stored .. stop go to host blocks, positions start .. stop to rows [L, R, H, n, 2, D]. Rows behind the span's
    are left unchanged.

    slots: of each span the slot of its position 0, if slabs [1, H, N, 2, D] hold pieces of prompts: then sink is 0 and ring at
        least their ends. A slot is below 0 if the piece begins behind position 0.

    Row t of layer l and sequence b goes to blocks[l][b][t // block_size][:, t % block_size].

    format: row format of the blocks; None: the slabs'. A row that the format rounds is rounded in the slab and in `rows`
        too.
    """
    for slab, own, taken in zip(slabs, blocks, rows, strict=True):
        for (seq, start, stop, stored), slot, out in zip(spans, slots or [0] * len(spans), taken, strict=True):
            held = slab[0 if slots else seq]
            place = place_of(torch.arange(stored, stop, device=slab.device), sink, ring) + slot
            leaving = held.index_select(1, place)
            if format is not None and (encoded := format.encode(leaving)) is not leaving:
                held.index_copy_(1, place, format.decode(encoded))
                leaving = encoded
            while leaving.shape[1]:
                number, offset = divmod(stored, block_size)
                some, leaving = leaving[:, : block_size - offset], leaving[:, block_size - offset :]
                own[seq][number][:, offset : offset + some.shape[1]].copy_(some, non_blocking=True)
                stored += some.shape[1]
            place = place_of(torch.arange(start, stop, device=slab.device), sink, ring) + slot
            out[:, : stop - start] = held.index_select(1, place)


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.row_format import copy_words, store_part

    @triton.jit(do_not_specialize=["count", "most", "sink", "ring", "seq_stride"])
    def _freeze(
        numbers, rows, count, most, block_size, width, sink, ring, seq_stride, head_stride,
        BLOCK: tl.constexpr, ALIGN: tl.constexpr, DIM: tl.constexpr,
    ):  # fmt: skip
        # Program (token, head, sequence of a layer) copies 2 D contiguous elements, as 32-bit words; if DIM is given it stores them
        # as e4m3. numbers: the spans with their slots, then of each layer the addresses of its slab and of its blocks, and how many
        # of a sequence.
        i, h, pair = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
        span, layer = numbers + 5 * (pair % count), numbers + 5 * count + 3 * (pair // count)
        seq, start, stop, stored = tl.load(span), tl.load(span + 1), tl.load(span + 2), tl.load(span + 3)
        row = tl.minimum(start, stored) + i
        if row < stop:
            place = tl.where(row < sink, row, sink + (row - sink) % ring) + tl.load(span + 4)
            # The compiler cannot infer the alignment of an address that it loads.
            source = tl.multiple_of(tl.load(layer).to(rows.dtype), 16) + seq * seq_stride + h * head_stride
            table = tl.load(layer + 1).to(tl.pointer_type(tl.int64)) + seq * tl.load(layer + 2)
            new, taken = row >= stored, row >= start
            block = tl.load(table + row // block_size, mask=new, other=0)
            out = (pair * tl.num_programs(1) + h) * most + row - start
            if DIM is not None:
                target = block + (h * block_size + row % block_size) * width + tl.zeros((1,), tl.int64)
                d, known = tl.arange(0, BLOCK)[None, :], target != 0
                for part in tl.static_range(2):
                    x = tl.load(source + (2 * place + part) * DIM + d, mask=d < DIM, other=0.0)
                    rounded = store_part(target, known & new, x.to(tl.float32), tl.arange(0, BLOCK), part, DIM).to(x.dtype)
                    tl.store(source + (2 * place + part) * DIM + d, rounded, mask=(d < DIM) & new)
                    tl.store(rows + (2 * out + part) * DIM + d, tl.where(new, rounded, x), mask=(d < DIM) & taken)
            else:
                target = block.to(tl.pointer_type(tl.int32)) + (h * block_size + row % block_size) * width
                if new:
                    copy_words(source + place * width, tl.multiple_of(target, ALIGN), width, BLOCK)
                if taken:
                    copy_words(source + place * width, rows + out * width, width, BLOCK)


def freeze(
    slabs: Sequence[Tensor],
    tables: Sequence[Tensor | None],
    block_size: int,
    spans: Sequence[Span],
    rows: Tensor,
    *,
    sink: int,
    ring: int,
    slots: Sequence[int] = (),
    format: RowFormat | None = None,
) -> None:
    """Launch the kernel: as `definition`, on the slabs' current stream, without a sync.

    slabs: contiguous, with equal shapes. tables [B, blocks] int64: of each layer the addresses of its blocks, pinned if the
        slabs are on a GPU, on the slabs' device; None stores nothing.
    """
    like = slabs[0]
    numbers = [number for span, slot in zip(spans, slots or [0] * len(spans), strict=True) for number in (*span, slot)]
    for slab, table in zip(slabs, tables, strict=True):
        assert slab.is_contiguous() and slab.shape == like.shape and slab.dtype == like.dtype
        assert table is None or (table.stride(1) == 1 and table.dtype == torch.int64)
        numbers += (slab.data_ptr(), 0, 0) if table is None else (slab.data_ptr(), table.data_ptr(), table.stride(0))
    assert rows.is_contiguous() and rows.dtype == like.dtype and rows.shape[:3] == (len(slabs), len(spans), like.shape[1])
    words, width, how = copying(rows[0], format)
    seq_stride, head_stride = like.view(words.dtype).stride()[:2]
    longest = max(stop - min(start, stored) for _, start, stop, stored in spans)
    assert not slots or len(like) == 1
    _freeze[(max(1, longest), like.shape[1], len(spans) * len(slabs))](
        torch.tensor(numbers).to(like.device, non_blocking=True), words, len(spans), rows.shape[3], block_size, width,
        sink, ring, 0 if slots else seq_stride, head_stride,
        **how,
    )  # fmt: skip
