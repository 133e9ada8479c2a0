"""Exact scores of rows whose keys are in host memory: the kernel multiplies the keys as it reads them (IceCache's tree on the
device).

It reads D elements per row and writes only scores: 8 KV heads x 1024 rows of 256 bytes are 2.1 MB, 44 us at the 48 GB/s
that scattered rows reach over the bus. One read serves all query heads of a group. Its outputs have the format of `rerank`,
for `topk`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.rerank import TILE, Estimates
from kvthaw.kernels.row_format import RowFormat
from kvthaw.native import gather_rows

SPLITS = 64
"""Programs per KV head."""


def definition(query: Tensor, table: Tensor, block_size: int, rows: Tensor, format: RowFormat | None = None) -> Tensor:
    """Compute q.k, unscaled, [B, H, G, W] float32; -inf where rows [B, H, W] int32 is -1.

    query [B, Hq, D] of the keys' dtype. table [B, blocks] int64: host addresses of blocks [H, block_size, *tail] of a format, None
    for [2, D] of the same dtype; row t of a sequence is row t % block_size of its block t // block_size.
    """
    batch, heads, width = rows.shape
    rows, format = rows.cpu().contiguous(), format or RowFormat(query.shape[2], query.dtype)
    found = torch.empty((int((rows >= 0).sum()), *format.tail), dtype=format.stored)
    _, where = gather_rows(table[:batch].cpu().contiguous(), block_size, rows, found)
    keys = torch.zeros((batch * heads * width, query.shape[2]))
    keys[where] = format.decode_keys(found).float()
    keys = keys.view(batch, heads, width, -1).to(query.device)
    scores: Tensor = query.float().unflatten(1, (heads, -1)) @ keys.transpose(2, 3)
    return scores.masked_fill((rows < 0)[:, :, None].to(query.device), -torch.inf)


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.gpu import PRECISION
    from kvthaw.kernels.parts import accumulate, store_part
    from kvthaw.kernels.row_format import load_part

    @triton.jit
    def _read(query, table, candidates, wanted, scores, peaks, parts, heads, block_size, addresses, dim, words, row_bytes, width,
              scale, G: tl.constexpr, GP: tl.constexpr, WP: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr,
              PAIRS: tl.constexpr, UPCAST: tl.constexpr, ALIGN: tl.constexpr, DIM: tl.constexpr):  # fmt: skip
        # Program: every SPLITS-th tile of candidates of one KV head, for all its query heads. A key is read in 32-bit words of
        # one element or (PAIRS) two; elements at even and odd positions are multiplied separately. DIM: a key is e4m3.
        split, head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        splits = tl.num_programs(0)
        pair = (seq * heads + head).to(tl.int64)
        count = tl.load(wanted + seq)
        w, g = tl.arange(0, WP), tl.arange(0, GP)
        kind = query.dtype.element_ty
        step = 2 if PAIRS else 1
        source = query + (pair * G + g[None, :]) * dim + w[:, None] * step
        there = (w < words)[:, None] & (g < G)[None, :]
        even = tl.load(source, mask=there, other=0.0)
        odd = tl.load(source + 1, mask=there, other=0.0) if PAIRS else even
        if UPCAST:
            even, odd = even.to(tl.float32), odd.to(tl.float32)
        runs = tl.cdiv(width, TILE) * (TILE // RUN)
        top = tl.full((TILE, GP), float("-inf"), tl.float32)
        mass = tl.zeros((TILE, GP), tl.float32)
        for tile in range(split, tl.cdiv(count, TILE), splits):
            m = tile * TILE + tl.arange(0, TILE)
            live = m < count
            row = tl.load(candidates + pair * width + m, mask=live, other=0)
            block = tl.load(table + seq.to(tl.int64) * addresses + row // block_size, mask=live, other=0)
            key = block + (head * block_size + row % block_size).to(tl.int64) * row_bytes
            if DIM is None:
                at = tl.multiple_of(key.to(tl.pointer_type(tl.int32)), ALIGN)[:, None] + w[None, :]  # no address tells
                word = tl.load(at, mask=live[:, None] & (w < words)[None, :], other=0)
            if DIM is not None:
                score = tl.dot(load_part(key, live, w, 0, DIM).to(even.dtype), even, input_precision=PRECISION)
            elif PAIRS:
                first = word.to(tl.int16).to(kind, bitcast=True)
                second = (word >> 16).to(tl.int16).to(kind, bitcast=True)
                if UPCAST:
                    first, second = first.to(tl.float32), second.to(tl.float32)
                score = tl.dot(second, odd, tl.dot(first, even))
            else:
                score = tl.dot(word.to(tl.float32, bitcast=True), even, input_precision=PRECISION)
            here = (g < G)[None, :]
            tl.store(scores + (pair * G + g[None, :]) * width + m[:, None], score, mask=here & live[:, None])
            score = tl.where(live[:, None], score, float("-inf"))
            peak = tl.max(tl.reshape(score, (TILE // RUN, RUN, GP)), axis=1)
            run = tile * (TILE // RUN) + tl.arange(0, TILE // RUN)
            tl.store(peaks + (pair * G + g[None, :]) * runs + run[:, None], peak, mask=here)
            top, mass = accumulate(top, mass, score * scale)
        store_part(parts + ((pair * G + g) * splits + split) * 2, top, mass, g < G)


def launch(
    query: Tensor, table: Tensor, block_size: int, candidates: Tensor, wanted: Tensor, *, scale: float, run: int = TILE,
    format: RowFormat | None = None,
) -> Estimates:  # fmt: skip
    """Launch the kernel: scores, parts and peaks of candidates.

    candidates: [B, H, W] int32; the first wanted[b] of each sequence are rows. W is a multiple of TILE.

    query: [B, Hq, D] in the keys' dtype.
    table: [B, blocks] int64 on the device, addresses of the blocks.
    scale: of the softmax, for the parts.
    run: see Estimates.
    """
    batch, heads, width = candidates.shape
    dim, group, bytes_ = query.shape[2], query.shape[1] // heads, query.dtype.itemsize
    query = query.contiguous()
    assert candidates.is_contiguous() and wanted.is_contiguous() and wanted.dtype == candidates.dtype == torch.int32
    assert table.is_contiguous() and table.dtype == torch.int64 and table.shape[0] >= batch
    assert width % TILE == 0 and TILE % run == 0, f"{width} candidates in runs of {run}"
    fp8 = format is not None and format.fp8
    assert fp8 or dim * bytes_ % 4 == 0, "a key is read in 32-bit words"
    words = dim if fp8 else dim * bytes_ // 4
    row_bytes = 2 * dim * bytes_ if format is None else format.row_bytes
    found = Estimates.empty((batch, heads, group), width, SPLITS, run, query.device)
    _read[(SPLITS, heads, batch)](
        query, table, candidates, wanted, found.scores, found.peaks, found.parts, heads, block_size, table.stride(0), dim, words,
        row_bytes, width, scale, G=group, GP=max(16, triton.next_power_of_2(group)), WP=max(16, triton.next_power_of_2(words)),
        TILE=TILE, RUN=run, PAIRS=bytes_ == 2 and not fp8, UPCAST=query.device.type == "cpu", ALIGN=16 if words % 4 == 0 else 4,
        DIM=dim if fp8 else None, num_warps=4,
    )  # fmt: skip
    return found


def stored_scores(
    query: Tensor, table: Tensor, block_size: int, candidates: Tensor, wanted: Tensor, *, scale: float, run: int = TILE,
    format: RowFormat | None = None,
) -> Estimates | Tensor:  # fmt: skip
    """Run `launch` on a GPU, `definition` elsewhere."""
    if HAS_TRITON and query.is_cuda:
        return launch(query, table, block_size, candidates, wanted, scale=scale, run=run, format=format)
    return definition(query, table, block_size, candidates, format)
