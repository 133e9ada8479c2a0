"""The keys of a stretch of tokens, from the host store to the device: what PRKV's refresh reads.

H T D elements cross the bus once, 268 MB for 128k tokens of 8 heads, d = 128, bf16: 4.9 ms at 55 GB/s. In the store a key
stands before its value, so a copy engine would bring both; a kernel reads the pinned keys alone, in pieces of 2 D bytes (44.8
GB/s were measured). It has few programs, that stay: they ask for about as many bytes as the bus has under way (some 100 KB in
2 us). With a program a block, all multiprocessors would be taken for as long as the bus takes, and the steps beside it would
wait; and what a step fetches meanwhile would stand in line behind megabytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON

if TYPE_CHECKING:
    from kvthaw.cache.host import HostStore

_UNDER_WAY = 256 << 10
"""Bytes that all programs ask for at once."""


def definition(store: HostStore, lane: int, start: int, stop: int, device: torch.device, into: Tensor | None = None) -> Tensor:
    """Keys [H, stop - start, D] of a lane on the device, contiguous or in `into`, where those of a head neighbour each other."""
    keys = store.read(lane, start, stop)[:, :, 0]
    return keys.contiguous().to(device) if into is None else into.copy_(keys)


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["start", "count"])
    def _stream_keys(
        table, out, start, count, extent, width, out_head, ROWS: tl.constexpr, WP: tl.constexpr, ALIGN: tl.constexpr
    ):  # fmt: skip
        # A program takes every so many-th block of rows of a head, in 32-bit words; a block may end in the next extent.
        h, word = tl.program_id(1).to(tl.int64), tl.arange(0, WP)
        for block in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
            i = block * ROWS + tl.arange(0, ROWS)
            known, row = i < count, start + i
            base = tl.load(table + row // extent, mask=known, other=0).to(tl.pointer_type(tl.int32))
            source = tl.multiple_of(base + (h * extent + row % extent) * 2 * width, ALIGN)  # which no address from memory tells
            inside = known[:, None] & (word < width)[None, :]
            words = tl.load(source[:, None] + word[None, :], mask=inside, other=0)
            tl.store(out + h * out_head + i[:, None] * width + word[None, :], words, mask=inside)


def launch(store: HostStore, lane: int, start: int, stop: int, device: torch.device, into: Tensor | None = None) -> Tensor:
    """The Triton kernel; arguments and result as in `definition`. On a GPU the store is pinned and stays until the kernel
    ends."""
    heads, dim, count = store.kv_heads, store.head_dim, stop - start
    assert store.pinned or device.type == "cpu", "a kernel reads pinned memory only"
    assert 0 <= start <= stop <= store.length(lane), f"rows {start}..{stop} of {store.length(lane)}"
    width = dim * store.dtype.itemsize // 4
    assert dim * store.dtype.itemsize % 4 == 0, "a key is copied in 32-bit words"
    out = torch.empty((heads, count, dim), dtype=store.dtype, device=device) if into is None else into
    assert out.shape == (heads, count, dim) and out.stride()[1:] == (dim, 1) and out.dtype == store.dtype
    if count:
        table = store.addresses(lane)
        if device.type == "cuda":  # so that the host does not wait for the stream
            table = table.pin_memory().to(device, non_blocking=True)
        rows, wide = 32, triton.next_power_of_2(width)
        programs = max(1, _UNDER_WAY // (heads * rows * width * 4))
        _stream_keys[(min(programs, triton.cdiv(count, rows)), heads)](
            table,
            out.view(torch.int32),
            start,
            count,
            store.extent,
            width,
            out.stride(0) * out.element_size() // 4,
            ROWS=rows,
            WP=wide,
            ALIGN=16 if width % 4 == 0 else 4,
        )
    return out


def stream_keys(store: HostStore, lane: int, start: int, stop: int, device: torch.device, into: Tensor | None = None) -> Tensor:
    """As `definition`: the kernel where the device is a GPU and the store pinned, a copy elsewhere; after rows that are on their
    way to the host have arrived."""
    if HAS_TRITON and device.type == "cuda" and store.pinned:
        if store.arriving is not None:
            torch.cuda.current_stream(device).wait_event(store.arriving)
        return launch(store, lane, start, stop, device, into)
    if store.arriving is not None:
        store.arriving.synchronize()
    return definition(store, lane, start, stop, device, into)
