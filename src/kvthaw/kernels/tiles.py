"""Tiles of rows that kernels multiply."""

from __future__ import annotations

from kvthaw.kernels import HAS_TRITON

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def load_rows(source, row, stride, known, dim, DP: tl.constexpr, UPCAST: tl.constexpr):
        # Load rows [n], `stride` elements apart; the first dim elements of each are contiguous. Returns [n, DP], 0 where
        # not known and beyond dim, in float32 if UPCAST.
        d = tl.arange(0, DP)
        tile = tl.load(source + row[:, None] * stride + d[None, :], mask=known[:, None] & (d < dim)[None, :], other=0.0)
        if UPCAST:
            tile = tile.to(tl.float32)
        return tile
