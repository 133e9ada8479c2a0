"""Linear layers of one token, with the norm before them, and the gate or the residual sum behind them, in one launch.

A step of one token reads each weight once: 436 MB in a layer of Llama-3.1-8B, 98 us at 4.47 TB/s. What the launch between two
products costs comes on top of it: the memory is idle from the last load of one product to the first load of the next. These
kernels load weights before they wait for their predecessor, which nothing writes, so the memory stays busy.

Each program serves several blocks of rows of a weight, one after the other. It normalises the token once, and it loads the
next block while it multiplies this one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvthaw.kernels import HAS_TRITON, gated, rms_norm
from kvthaw.kernels.chain import dependent
from kvthaw.kernels.gated import Activation
from kvthaw.kernels.gpu import by_device
from kvthaw.kernels.rms_norm import Norm


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a kernel divides its weights.

    rows, width: rows and columns that a program loads at once, powers of two.
    programs: programs per multiprocessor.
    warps: warps of a program.
    """

    rows: int
    width: int
    programs: int
    warps: int


def definition(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    gate: Activation | None = None,
) -> list[Tensor]:
    """Return x W' + b for each weight W [N, K] and bias b [N] or None.

    x: one token, [1, K]. With a norm it is normalised first.
    residual: [1, N]. It is added to the rounded product.
    gate: return activation(x W0') * (x W1') of two weights of one shape instead.
    """
    x = x if norm is None else rms_norm.definition(x, norm)
    found = [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    if gate is not None:
        found = [gated.definition(found[0], found[1], gate)]
    return found if residual is None else [residual + y for y in found]


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.chain import follow
    from kvthaw.kernels.gated import multiplied
    from kvthaw.kernels.rms_norm import scaled

    @triton.jit
    def _load(weight, row, n, tile, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
        # A block [BN, BK] of a weight [n, K], from column tile * BK.
        column = tile * BK + tl.arange(0, BK)
        at = weight + row.to(tl.int64)[:, None] * K + column[None, :]
        inside = (row < n)[:, None]
        if K % BK:
            inside = inside & (column < K)[None, :]
        return tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")

    @triton.jit
    def _token(x, norm, scale, offset, tile, K: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr, LATE: tl.constexpr):
        # A part [BK] of the token in float32, as the norm rounds it.
        column = tile * BK + tl.arange(0, BK)
        part = tl.load(x + column, mask=column < K, other=0.0).to(tl.float32)
        if NORM:
            by = tl.load(norm + column, mask=column < K, other=0.0).to(tl.float32)
            kind = x.dtype.element_ty
            part = scaled(part, scale, by, offset, kind, LATE).to(kind).to(tl.float32)
        return part

    @triton.jit
    def _product(weight, first, row, n, x, norm, scale, offset, token, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                 NORM: tl.constexpr, LATE: tl.constexpr):  # fmt: skip
        # Rows of a weight times the token, [BN] in float32. first: the block of the first columns; token: their part of x.
        TILES: tl.constexpr = (K + BK - 1) // BK
        if TILES == 1:
            total = tl.sum(first.to(tl.float32) * token[None, :], axis=1)
        else:
            tile = first
            sums = tl.zeros((BN, BK), tl.float32)
            for i in tl.static_range(TILES):
                following = tile
                if i + 1 < TILES:
                    following = _load(weight, row, n, i + 1, K, BN, BK)
                part = token
                if i > 0:
                    part = _token(x, norm, scale, offset, i, K, BK, NORM, LATE)
                sums += tile.to(tl.float32) * part[None, :]
                tile = following
            total = tl.sum(sums, axis=1)
        return total

    @triton.jit
    def _part(block, x0, x1, x2, n0, n1, n2, end0, end1, PARTS: tl.constexpr):
        # The tensor that belongs to a block's weight, the rows of that weight, and its first block.
        x, n, start = x0, n0, end0 * 0
        if PARTS > 1 and block >= end0:
            x, n, start = x1, n1, end0
        if PARTS > 2 and block >= end1:
            x, n, start = x2, n2, end1
        return x, n, start

    @triton.jit
    def _linear(out0, out1, out2, x, norm, residual, w0, w1, w2, b0, b1, b2, n0, n1, n2, eps, offset,
                K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr,
                NORM: tl.constexpr, LATE: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
        # Program: every tl.num_programs(0)th block of BN rows, of the weights one after the other.
        TILES: tl.constexpr = (K + BK - 1) // BK
        block, step = tl.program_id(0), tl.num_programs(0)
        end0 = tl.cdiv(n0, BN)
        end1 = end0 + (tl.cdiv(n1, BN) if PARTS > 1 else 0)
        blocks = end1 + (tl.cdiv(n2, BN) if PARTS > 2 else 0)
        weight, n, start = _part(block, w0, w1, w2, n0, n1, n2, end0, end1, PARTS)
        row = (block - start) * BN + tl.arange(0, BN)
        tile = _load(weight, row, n, 0, K, BN, BK)
        if GATED:
            upper = _load(w1, row, n, 0, K, BN, BK)
        follow(PDL)
        scale = 1.0
        if NORM:
            squares = tl.zeros((BK,), tl.float32)
            for i in tl.static_range(TILES):
                part = _token(x, norm, scale, offset, i, K, BK, False, LATE)
                squares += part * part
            scale = tl.rsqrt(tl.sum(squares) / K + eps)
        token = _token(x, norm, scale, offset, 0, K, BK, NORM, LATE)
        for current in tl.range(block, blocks, step):
            here, here_n, here_tile, here_row = weight, n, tile, row
            coming = current + step
            weight, n, start = _part(coming, w0, w1, w2, n0, n1, n2, end0, end1, PARTS)
            row = (coming - start) * BN + tl.arange(0, BN)
            tile = _load(weight, row, n, 0, K, BN, BK)
            y = _product(here, here_tile, here_row, here_n, x, norm, scale, offset, token, K, BN, BK, NORM, LATE)
            kind = out0.dtype.element_ty
            out, _, _ = _part(current, out0, out1, out2, n0, n1, n2, end0, end1, PARTS)
            bias, _, _ = _part(current, b0, b1, b2, n0, n1, n2, end0, end1, PARTS)
            inside = here_row < here_n
            if BIAS:
                y += tl.load(bias + here_row, mask=inside, other=0.0).to(tl.float32)
            y = y.to(kind)
            if GATED:
                here_upper = upper
                upper = _load(w1, row, n, 0, K, BN, BK)
                up = _product(w1, here_upper, here_row, here_n, x, norm, scale, offset, token, K, BN, BK, NORM, LATE)
                if BIAS:
                    up += tl.load(b1 + here_row, mask=inside, other=0.0).to(tl.float32)
                y = multiplied(y.to(tl.float32), up.to(kind).to(tl.float32), kind, SILU).to(kind)
            if ADD:
                y = (tl.load(residual + here_row, mask=inside, other=0.0).to(tl.float32) + y.to(tl.float32)).to(kind)
            tl.store(out + here_row, y, mask=inside)


def launch(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    gate: Activation | None = None,
    blocks: Blocks | None = None,
) -> list[Tensor]:
    """Launch the Triton kernel; arguments and results as in `definition`, for up to three weights.

    All biases are given or none. Everything is contiguous and of one dtype.
    """
    width, parts = x.shape[-1], 1 if gate else len(weights)
    given = [bias for bias in biases if bias is not None]
    assert len(given) in (0, len(weights)) and len(weights) == (2 if gate else parts) and parts <= 3
    assert x.numel() == width and all(t.is_contiguous() and t.dtype == x.dtype for t in (x, *weights, *given))
    assert all(weight.shape[1] == width for weight in weights) and not (residual is not None and parts > 1)
    out = [x.new_empty((*x.shape[:-1], len(weight))) for weight in weights[:parts]]
    how = blocks or blocks_for(width, gated=gate is not None)
    total = sum(triton.cdiv(len(weight), how.rows) for weight in weights[:parts])
    w, b, o = [*weights, weights[0], weights[0]], [*given, *[weights[0]] * 3], [*out, out[0], out[0]]
    grid = min(total, how.programs * _multiprocessors(x.device))
    _linear[(grid,)](
        *o[:3], x, x if norm is None else norm.weight, x if residual is None else residual, *w[:3], *b[:3],
        *(len(weight) for weight in w[:3]), *((0.0, 0.0) if norm is None else (norm.eps, norm.offset)),
        K=width, BN=how.rows, BK=how.width, PARTS=parts, GATED=gate is not None, SILU=gate == "silu",
        NORM=norm is not None, LATE=norm is not None and norm.late, ADD=residual is not None, BIAS=bool(given),
        num_warps=how.warps, **dependent(x.device),
    )  # fmt: skip
    return out


def blocks_for(width: int, *, gated: bool) -> Blocks:
    """Return how a kernel divides weights of this width: 16 KB a block, where an H200 was fastest."""
    tensors = 2 if gated else 1
    if width <= 4096:
        columns = triton.next_power_of_2(width)
        return Blocks(max(1, 8192 // columns // tensors), columns, 4, 4)
    return Blocks(2 // tensors, 2048, 8 // tensors, 4) if width <= 8192 else Blocks(2 // tensors, 4096, 2, 8)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


linear = by_device(launch, definition)
