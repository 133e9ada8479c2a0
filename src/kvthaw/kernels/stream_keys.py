"""Copy consecutive tokens from blocks to one tensor: their keys from the host, as PRKV's refresh does, or whole rows on the device.

H T D elements cross the bus once: 268 MB for 128k tokens of 8 heads, D = 128, bf16, 4.9 ms at 55 GB/s. A block stores each
key next to its value, so a copy engine would transfer both; the kernel reads only the pinned keys, 2 D bytes at a time
(44.8 GB/s measured). It uses few persistent programs. Together they request about the bytes that the bus keeps in flight
(100 KB in 2 us). One program per block of rows would occupy all multiprocessors for the whole transfer, and the concurrent
decode steps and their fetches would wait.

`stream_rows` copies whole rows of blocks on the device, in one launch for any number of blocks. 16k tokens of 8 heads, D =
128, bf16 read and write 134 MB, 31 us at 4.3 TB/s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.row_format import RowFormat

_IN_FLIGHT = 256 << 10
"""Bytes that all programs together request at once."""
_ROWS = 32


def definition(blocks: Sequence[Tensor], start: int, out: Tensor, format: RowFormat | None = None) -> None:
    """Copy the keys of rows start .. start + n to out [H, n, D]. Row t is blocks[t // E][:, t % E]; blocks are [H, E, *tail] of a
    format, None for that of out."""
    done, size, format = 0, out.shape[1], format or RowFormat(out.shape[2], out.dtype)
    while done < size:
        number, offset = divmod(start + done, blocks[0].shape[1])
        keys = format.decode_keys(blocks[number][:, offset : offset + size - done])
        out[:, done : done + keys.shape[1]] = keys
        done += keys.shape[1]


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.row_format import load_part

    @triton.jit(do_not_specialize=["seqs", "blocks", "start", "count"])
    def _stream_keys(
        table, out, seqs, blocks, start, count, block_size, width, row, out_seq, out_head,
        ROWS: tl.constexpr, WP: tl.constexpr, ALIGN: tl.constexpr, DIM: tl.constexpr,
    ):  # fmt: skip
        # Program (p, head) copies every num_programs-th tile of ROWS rows of all sequences: the first `width` 32-bit words of the
        # `row` that each has, or keys from e4m3 if DIM is given. A tile may span two blocks.
        h, word, tiles = tl.program_id(1).to(tl.int64), tl.arange(0, WP), tl.cdiv(count, ROWS)
        for tile in range(tl.program_id(0), seqs * tiles, tl.num_programs(0)):
            seq, i = (tile // tiles).to(tl.int64), tile % tiles * ROWS + tl.arange(0, ROWS)
            known, at, head = i < count, start + i, out + seq * out_seq + h * out_head
            block = tl.load(table + seq * blocks + at // block_size, mask=known, other=0)
            if DIM is not None:
                keys = load_part(block + (h * block_size + at % block_size) * row, known, word, 0, DIM)
                target = head + i[:, None] * DIM + word[None, :]
                tl.store(target, keys.to(out.dtype.element_ty), mask=known[:, None] & (word < DIM)[None, :])
            else:
                # The compiler cannot infer the alignment of an address that it loads.
                base = block.to(tl.pointer_type(tl.int32))
                source = tl.multiple_of(base + (h * block_size + at % block_size) * row, ALIGN)
                inside = known[:, None] & (word < width)[None, :]
                words = tl.load(source[:, None] + word[None, :], mask=inside, other=0)
                tl.store(head + i[:, None] * width + word[None, :], words, mask=inside)


def stream_keys(table: Tensor, block_size: int, start: int, out: Tensor, format: RowFormat | None = None) -> None:
    """Launch the kernel: as `definition` for each of R sequences, out [R, H, n, D], on the current stream of out, without a sync.

    table [R, blocks] int64: addresses of the blocks [H, block_size, *tail], on the device; pinned memory where out is on a GPU. The
    caller keeps the blocks alive until the kernel ends. Each head of out is contiguous.
    """
    _, heads, _, dim = out.shape
    assert out.stride()[2:] == (dim, 1), f"the rows of a head must be contiguous, not {out.stride()}"
    key_bytes = dim * out.element_size()
    programs = max(1, _IN_FLIGHT // (heads * _ROWS * key_bytes))
    if format is not None and format.fp8:
        _launch(table, block_size, start, out, dim, format.row_bytes, programs, dim)
    else:
        assert key_bytes % 4 == 0, "keys are copied in 32-bit words"
        _launch(table, block_size, start, out.view(torch.int32), key_bytes // 4, key_bytes // 2, programs)


def stream_rows(table: Tensor, block_size: int, start: int, out: Tensor) -> None:
    """Copy rows start .. start + n of blocks [H, block_size, *tail], as they are stored, to out [H, n, *tail], on its current
    stream, without a sync. Otherwise as `stream_keys`."""
    assert out[:1].is_contiguous(), f"the rows of a head must be contiguous, not {out.stride()}"
    assert math.prod(out.shape[2:]) * out.element_size() % 4 == 0, "rows are copied in 32-bit words"
    words = out.view(torch.int32).flatten(2)
    _launch(table[None], block_size, start, words[None], words.shape[2], words.shape[2], triton.cdiv(out.shape[1], _ROWS))


def _launch(
    table: Tensor, block_size: int, start: int, out: Tensor, width: int, row: int, programs: int, dim: int | None = None
) -> None:
    (seqs, heads, count), blocks = out.shape[:3], table.shape[1]
    assert table.dtype == torch.int64 and table.is_contiguous() and len(table) == seqs
    assert 0 <= start <= blocks * block_size - count, f"rows {start}..{start + count} of {blocks} blocks of {block_size}"
    if count:
        _stream_keys[(min(programs, seqs * triton.cdiv(count, _ROWS)), heads)](
            table, out, seqs, blocks, start, count, block_size, width, row, *out.stride()[:2], ROWS=_ROWS,
            WP=triton.next_power_of_2(width), ALIGN=16 if width % 4 == 0 else 4, DIM=dim,
        )  # fmt: skip
