"""Copy the keys and values of prompts to rows, each a token's K and then its V, and flag the prompts that are not finite.

8,192 tokens of a layer of 8 heads, D = 128, bf16 are 32 MiB, read once and written once: 16 us of an H200. Two copies by
torch and a norm, which reads the rows again, take 100 us.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.gpu import upload

_TILE = 64  # tokens of a program


@dataclass(frozen=True)
class Prompts:
    """The keys and values of one layer, [H, n, D] each with any strides, and its flags [B] int32."""

    keys: Tensor
    values: Tensor
    flags: Tensor


def definition(layers: Sequence[Prompts], spans: Sequence[tuple[int, int, int]], rows: Tensor) -> None:
    """Copy to rows [L, H, n, 2, D], and set the flags of prompts whose keys or values are not finite to 1. No host sync.

    spans: sequence and tokens start .. stop of each prompt, which together are all n.
    """
    parts = [part for each in layers for part in (each.keys, each.values)]
    torch._foreach_copy_([part for each in rows for part in each.unbind(2)], parts)
    places = [rows[:, :, start:stop] for _, start, stop in spans]
    norms = torch.stack([torch.linalg.vector_norm(own, torch.inf, dim=(1, 2, 3, 4)) for own in places], dim=1)
    bad = (norms - norms).isnan().int().flatten()
    torch._foreach_maximum_([each.flags[seq] for each in layers for seq, _, _ in spans], list(bad.unbind()))


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["count", "tokens"])
    def _interleave(
        numbers, rows, count, tokens,
        DIM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, ALIGN: tl.constexpr, BYTES: tl.constexpr,
    ):  # fmt: skip
        # Program (tile, head, prompt of a layer). numbers: the prompts' spans, then of each layer the address of its keys and their
        # strides of head and token, the same of its values, and the address and stride of its flags.
        h, pair = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
        span, layer = numbers + 3 * (pair % count), numbers + 3 * count + 8 * (pair // count)
        stop, t = tl.load(span + 2), tl.load(span + 1) + tl.program_id(0) * TILE + tl.arange(0, TILE)
        if tl.load(span + 1) + tl.program_id(0) * TILE < stop:
            d = tl.arange(0, BLOCK)
            seen = (t < stop)[:, None] & (d < DIM)[None, :]
            out = (((pair // count) * tl.num_programs(1) + h) * tokens + t)[:, None] * (2 * DIM) + d[None, :]
            bad = 0
            for part in tl.static_range(2):
                own = layer + 3 * part
                # The compiler cannot infer the alignment of an address or a stride that it loads.
                source = tl.multiple_of(tl.load(own).to(rows.dtype), BYTES) + h * tl.multiple_of(tl.load(own + 1), ALIGN)
                x = tl.load(source + t[:, None] * tl.multiple_of(tl.load(own + 2), ALIGN) + d[None, :], mask=seen, other=0.0)
                tl.store(rows + out + part * DIM, x, mask=seen)
                bad += tl.sum(tl.where(tl.abs(x.to(tl.float32)) < float("inf"), 0, 1))
            if bad > 0:
                flags = tl.load(layer + 6).to(tl.pointer_type(tl.int32))
                tl.store(flags + tl.load(span) * tl.load(layer + 7), 1)


def launch(layers: Sequence[Prompts], spans: Sequence[tuple[int, int, int]], rows: Tensor) -> None:
    """Launch the kernel: as `definition`, for layers of one shape. rows are contiguous."""
    heads, tokens, dim = layers[0].keys.shape
    numbers = [number for span in spans for number in span]
    aligned = True  # all rows begin at multiples of 16 bytes
    for each in layers:
        for part in (each.keys, each.values):
            assert part.stride(2) == 1 and part.shape == (heads, tokens, dim) and part.dtype == rows.dtype
            numbers += (part.data_ptr(), part.stride(0), part.stride(1))
            at = part.data_ptr(), part.stride(0) * part.itemsize, part.stride(1) * part.itemsize
            aligned = aligned and not any(number % 16 for number in at)
        assert each.flags.dtype == torch.int32
        numbers += (each.flags.data_ptr(), each.flags.stride(0))
    assert rows.is_contiguous() and rows.shape == (len(layers), heads, tokens, 2, dim)
    longest = max(stop - start for _, start, stop in spans)
    _interleave[(triton.cdiv(longest, _TILE), heads, len(spans) * len(layers))](
        upload(numbers, torch.int64, rows.device), rows, len(spans), tokens,
        DIM=dim, BLOCK=triton.next_power_of_2(dim), TILE=_TILE,
        ALIGN=16 // rows.itemsize if aligned else 1, BYTES=16 if aligned else rows.itemsize,
    )  # fmt: skip


def interleave(layers: Sequence[Prompts], spans: Sequence[tuple[int, int, int]], rows: Tensor) -> None:
    """Run `definition`, by the kernel on a GPU."""
    parts = [part for each in layers for part in (each.keys, each.values)]
    alike = all(part.stride(2) == 1 and part.dtype == rows.dtype for part in parts)  # under autocast K and V may differ
    (launch if HAS_TRITON and rows.is_cuda and alike else definition)(layers, spans, rows)
