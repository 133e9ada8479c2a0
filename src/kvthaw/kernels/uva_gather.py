"""Fetch selected rows over UVA: a kernel reads them from pinned host memory into their slots (ParisKV, section 4.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.row_format import RowFormat, copying

COUNTERS = 256
"""Sums over which the kernel spreads its count of rows, so that few programs add to the same one."""

PROGRAMS = 16384
"""Limit below which each program takes one row.

On an H200, with 110,592 programs for 24 sequences, the programs that had no row to copy took 67 us.
"""


def crossing(on_host: Tensor, block_size: int, fetch: Tensor) -> Tensor:
    """Return which of the rows [B, H, M] lie in blocks on the host, [B, H, M] bool. on_host [B, blocks] bool."""
    number = (fetch.long() // block_size).clamp_(min=0)
    return on_host[torch.arange(len(fetch), device=fetch.device)[:, None, None], number] & (fetch >= 0)


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.row_format import copy_words, load_part

    @triton.jit
    def _uva_gather(
        table, fetch, slots, slab, on_host, crossed, block_size, width, heads, count, offset, table_stride, seq_stride,
        head_stride, total, EACH: tl.constexpr, COUNTERS: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr, DIM: tl.constexpr,
    ):  # fmt: skip
        # Program: EACH of all (sequence, head, m), total in number. It copies 2 D contiguous elements of each that is wanted, as
        # 32-bit words, from the host to the slot; if DIM is given they are e4m3.
        first, e = tl.program_id(0).to(tl.int64) * EACH, tl.arange(0, EACH)
        rows = tl.load(fetch + first + e, mask=first + e < total, other=-1)
        places = tl.load(slots + first + e, mask=first + e < total, other=0)
        if tl.max(rows) >= 0:
            for i in range(EACH):
                row, slot = tl.sum(tl.where(e == i, rows, 0)), tl.sum(tl.where(e == i, places, 0))
                if row >= 0:
                    pid = first + i
                    h = (pid // count) % heads
                    b = pid // (count * heads)
                    if crossed is not None:
                        there = tl.load(on_host + b * table_stride + row // block_size)
                        tl.atomic_add(crossed + pid % COUNTERS, there.to(tl.int64), sem="relaxed")
                    block = tl.load(table + b * table_stride + row // block_size)
                    place = (offset + slot).to(tl.int64)
                    if DIM is not None:
                        source = block + (h * block_size + row % block_size) * width + tl.zeros((1,), tl.int64)
                        d = tl.arange(0, BLOCK)
                        keys, values = load_part(source, source != 0, d, 0, DIM), load_part(source, source != 0, d, 1, DIM)
                        # once both are on their way
                        target = slab + b * seq_stride + h * head_stride + 2 * place * DIM + d[None, :]
                        tl.store(target, keys.to(slab.dtype.element_ty), mask=(d < DIM)[None, :])
                        tl.store(target + DIM, values.to(slab.dtype.element_ty), mask=(d < DIM)[None, :])
                    else:
                        # The compiler cannot infer the alignment of an address that it loads.
                        base = block.to(tl.pointer_type(tl.int32))
                        source = tl.multiple_of(base + (h * block_size + row % block_size) * width, ALIGN)
                        target = slab + b * seq_stride + h * head_stride + place * width
                        copy_words(source, target, width, BLOCK)


def rows_each(rows: int, programs: int) -> int:
    """Return how many of `rows` rows each of about `programs` programs looks at, at most 16.

    More than one where many programs would have none to copy, or where few rows may be under way at once.
    """
    return min(16, max(1, 1 << (-(-rows // programs) - 1).bit_length()))


def uva_gather(
    table: Tensor,
    block_size: int,
    slab: Tensor,
    fetch: Tensor,
    slots: Tensor,
    offset: int,
    count: tuple[Tensor, Tensor] | None = None,
    format: RowFormat | None = None,
    programs: int = PROGRAMS,
) -> None:
    """Copy row fetch[b, h, m] of sequence b to slab[b, h, offset + slots[b, h, m]]; fetch -1 skips.

    Launches on the current stream, without a sync. Blocks lie in pinned or device memory.

    count: on_host of `crossing`, strided as table, and counters [COUNTERS] int64, to whose sum the rows that lie on the host are
    added.

    programs: limit below which each program takes one row. A program has one row under way at a time.

    table [B, blocks] int64: addresses of the blocks, on the device. slab [B, H, N, 2, D] contiguous. fetch, slots [B, H, M]
    int32.
    """
    assert slab.is_contiguous() and fetch.is_contiguous() and slots.is_contiguous() and table.is_contiguous()
    assert fetch.dtype == slots.dtype == torch.int32 and table.dtype == torch.int64
    words, width, how = copying(slab, format)
    if count is not None:
        assert count[0].shape == table.shape and count[0].is_contiguous() and count[0].dtype == torch.bool
        assert count[1].shape == (COUNTERS,) and count[1].dtype == torch.int64
    heads, rows, total = *fetch.shape[1:], fetch.numel()
    each = rows_each(total, programs)
    _uva_gather[(triton.cdiv(total, each),)](
        table, fetch, slots, words, *(count or (None, None)), block_size, width, heads, rows, offset, table.stride(0),
        words.stride(0), words.stride(1), total, EACH=each, COUNTERS=COUNTERS, **how,
    )  # fmt: skip
