"""Append tokens to pages of consecutive tokens and update each page's mean key and mean value, all layers in one launch.

The kernel reads each new row once, and the rows of the page that was open. It writes the means of the pages that the tokens
start or fill. 64 tokens of 8 heads, D = 128 and bf16 cost 0.5 MB a sequence and layer, which is 0.1 us at 4.3 TB/s. So a
launch costs its own latency, once whenever tokens leave the ring buffers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.gpu import by_device
from kvthaw.kernels.row_format import RowFormat
from kvthaw.kernels.split import triton_block

RING = 2
"""Pages whose rows are kept: the open page, and one that a truncation opens again."""


class Start(NamedTuple):
    """A sequence, and how many tokens its pages have."""

    seq: int
    tokens: int


class Added(NamedTuple):
    """What the pages of a layer are given.

    keys, values [R, H, n, D]: of R sequences. tail [B, H, RING page, 2, D]: the rows of the last tokens, token t at t modulo
    RING page. means [B, H, P, *format.tail]: the mean key and the mean value of each page, of the tokens that it has.
    """

    keys: Tensor
    values: Tensor
    tail: Tensor
    means: Tensor


def definition(every: Sequence[Added], starts: Sequence[Start], page: int, format: RowFormat) -> None:
    """Append keys and values to pages of `page` tokens of the R sequences of starts; there is room for the new pages.

    The means are computed in float32 and stored in a format. Writes tails and means in place."""
    for keys, values, tail, means in every:
        ring, n = tail.shape[2], keys.shape[2]
        for own, other, (seq, count) in zip(keys, values, starts, strict=True):
            new, at = torch.stack((own, other), dim=2), count
            for size in _cuts(count, n, page):
                rows = new[:, at - count : at - count + size]
                opened = at // page * page
                if opened < at:  # the page was open: only the first cut can continue one
                    there = torch.arange(opened, at, device=tail.device) % ring
                    rows = torch.cat((tail[seq].index_select(1, there), rows), dim=1)
                width = min(page, rows.shape[1])
                made = rows.unflatten(1, (-1, width)).mean(dim=2, dtype=torch.float32)
                means[seq, :, opened // page : opened // page + made.shape[1]] = format.encode(made)
                at += size
            _remember(tail, seq, new, count)


def _cuts(count: int, n: int, page: int) -> list[int]:
    """Split n tokens: what fills the open page, what makes whole pages, and what opens another. Zeros are left out."""
    head = min(n, -count % page)
    whole = (n - head) // page * page
    return [size for size in (head, whole, n - head - whole) if size]


def _remember(tail: Tensor, seq: int, new: Tensor, count: int) -> None:
    """Write the last of the new rows [H, n, 2, D] of a sequence to its ring."""
    ring, n = tail.shape[2], new.shape[1]
    few = min(n, ring)
    at = torch.arange(count + n - few, count + n, device=tail.device) % ring
    tail[seq].index_copy_(1, at, new[:, n - few :])


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.row_format import store_part

    @triton.jit(do_not_specialize=["count", "new"])
    def _page_means(
        numbers, like, count, new, ring, k_seq, k_head, k_token, v_seq, v_head, v_token, HEADS: tl.constexpr, PAGE: tl.constexpr,
        DIM: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, ALIGN: tl.constexpr, KEEP: tl.constexpr, FP8: tl.constexpr,
    ):  # fmt: skip
        # Program (page, counted from the open one; head; sequence of a layer). numbers: the starts, then of each layer the
        # addresses of keys, values, tail and means, and how many pages a head has room for. ALIGN: divides the address of each
        # row, in bytes, which the compiler cannot infer from an address that it loads. KEEP: the program writes the new rows to
        # the tail, from which no page is read that they overwrite where new is at most PAGE. FP8: bytes of a page's means in e4m3,
        # None for means in the rows' dtype.
        h, pair = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
        r, layer = pair % count, numbers + 2 * count + 5 * (pair // count)
        seq, known = tl.load(numbers + 2 * r), tl.load(numbers + 2 * r + 1)
        page = known // PAGE + tl.program_id(0)
        start, end = page * PAGE, known + new
        if start < end:
            row = seq * HEADS + h
            keys = tl.multiple_of(tl.load(layer).to(like.dtype) + (r * k_seq + h * k_head), ALIGN)
            values = tl.multiple_of(tl.load(layer + 1).to(like.dtype) + (r * v_seq + h * v_head), ALIGN)
            tail = tl.multiple_of(tl.load(layer + 2).to(like.dtype) + row * ring * (2 * DIM), ALIGN)
            stop = tl.minimum(start + PAGE, end)
            j, d = tl.arange(0, BLOCK_J), tl.arange(0, BLOCK_D)
            is_dim = d < DIM
            key_sums, value_sums = tl.zeros((BLOCK_J, BLOCK_D), tl.float32), tl.zeros((BLOCK_J, BLOCK_D), tl.float32)
            for begin in range(0, PAGE, BLOCK_J):
                t = start + begin + j
                inside = ((begin + j < PAGE) & (t < stop))[:, None] & is_dim[None, :]
                come = inside & (t >= known)[:, None]
                source = (t - known)[:, None]
                k = tl.load(keys + source * k_token + d[None, :], mask=come, other=0.0)
                v = tl.load(values + source * v_token + d[None, :], mask=come, other=0.0)
                key_sums += k.to(tl.float32)
                value_sums += v.to(tl.float32)
                if start < known or KEEP:
                    place = tail + (t % ring)[:, None] * (2 * DIM) + d[None, :]
                    there = inside & (t < known)[:, None]
                    key_sums += tl.load(place, mask=there, other=0.0).to(tl.float32)
                    value_sums += tl.load(place + DIM, mask=there, other=0.0).to(tl.float32)
                    if KEEP:
                        tl.store(place, k, mask=come)
                        tl.store(place + DIM, v, mask=come)
            key_sum, value_sum = tl.sum(key_sums, 0), tl.sum(value_sums, 0)
            size = (stop - start).to(tl.float32)
            out, place = tl.load(layer + 3), row * tl.load(layer + 4) + page
            if FP8 is None:
                out = out.to(like.dtype) + place * (2 * DIM) + d
                tl.store(out, (key_sum / size).to(like.dtype.element_ty), mask=is_dim)
                tl.store(out + DIM, (value_sum / size).to(like.dtype.element_ty), mask=is_dim)
            else:
                one = tl.zeros((1,), tl.int64)
                store_part(one + out + place * FP8, one == 0, (key_sum / size)[None, :], d, 0, DIM)
                store_part(one + out + place * FP8, one == 0, (value_sum / size)[None, :], d, 1, DIM)


def launch(every: Sequence[Added], starts: Sequence[Start], page: int, format: RowFormat) -> None:
    """Launch the Triton kernel; arguments as in `definition`.

    The elements of a row are contiguous, as are all tables. Keys of all layers have the same layout, and so have values.
    The host does not wait.
    """
    like, other, tail, _ = every[0]
    (seqs, heads, n, dim), numbers = like.shape, [number for start in starts for number in start]
    for keys, values, own, means in every:
        assert keys.stride(3) == values.stride(3) == 1
        assert keys.shape == values.shape == like.shape
        assert (keys.stride(), values.stride()) == (like.stride(), other.stride())
        assert keys.dtype == values.dtype == own.dtype == format.dtype
        assert means.dtype == format.stored
        assert own.is_contiguous()
        assert means.is_contiguous()
        assert max(start.tokens for start in starts) + n <= page * means.shape[2], "no room for the pages"
        numbers += [keys.data_ptr(), values.data_ptr(), own.data_ptr(), means.data_ptr(), means.shape[2]]
    most, block_d = max(start.tokens % page for start in starts) + n, triton_block(dim, 16)
    strides, size = (*like.stride()[:3], *other.stride()[:3]), like.element_size()
    addresses = [x.data_ptr() for keys, values, own, _ in every for x in (keys, values, own)]
    align = math.gcd(16, dim * size, *(size * stride for stride in strides), *addresses)
    _page_means[(-(-most // page), heads, seqs * len(every))](
        torch.tensor(numbers).to(like.device, non_blocking=True), like, seqs, n, tail.shape[2], *strides, HEADS=heads, PAGE=page,
        DIM=dim, BLOCK_J=min(triton_block(page, 16), max(16, 2048 // block_d)), BLOCK_D=block_d, ALIGN=align, KEEP=n <= page,
        FP8=format.row_bytes if format.fp8 else None, num_warps=4,
    )  # fmt: skip
    if n > page:
        few = min(n, tail.shape[2])
        for keys, values, own, _ in every:
            for r, (seq, count) in enumerate(starts):
                new = torch.stack((keys[r, :, n - few :], values[r, :, n - few :]), dim=2)
                _remember(own, seq, new, count + n - few)


page_means = by_device(launch, definition)
