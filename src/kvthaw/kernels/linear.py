"""Linear layers of one token, with the norm before them, and the gate or the residual sum behind them, in one launch.

A step of one token reads each weight once: 436 MB in a layer of Llama-3.1-8B, 98 us at 4.47 TB/s. What the launch between two
products costs comes on top of it: the memory is idle from the last load of one product to the first load of the next. These
kernels load weights before they wait for their predecessor, which nothing writes, so the memory stays busy.

Each program serves several blocks of rows of a weight, one after the other. It normalises the token once, and it loads the
next block while it multiplies this one. Queries and keys may be turned by their positions in the same launch: a program then has
both rows of each pair of dimensions that turn together.

Weights of 8 bits (weights.py) are loaded as words of four. At 4.4 TB/s an H200 has 7.6 instructions of a thread for each; the
kernel takes 4.1 to 4.5: half a conversion to float16, one to float32, a product, and sums over warps. Weights of 4 bits have a
kernel of their own (linear_int4.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvthaw.kernels import HAS_TRITON, gated, linear_int4, rms_norm, rotate
from kvthaw.kernels.chain import dependent
from kvthaw.kernels.gated import Activation
from kvthaw.kernels.gpu import by_device, nvidia
from kvthaw.kernels.linear_parts import Blocks
from kvthaw.kernels.rms_norm import Norm
from kvthaw.kernels.weights import TILE, Float8Weight, Int4Weight, Weight, dense, kind_of, readable

_CONVERT = """{
.reg .b16 low, high, a, b, c, d;
.reg .b32 ab, cd;
mov.b32 {low, high}, $4;
cvt.rn.f16x2.e4m3x2 ab, low;
cvt.rn.f16x2.e4m3x2 cd, high;
mov.b32 {a, b}, ab;
mov.b32 {c, d}, cd;
cvt.f32.f16 $0, a;
cvt.f32.f16 $1, b;
cvt.f32.f16 $2, c;
cvt.f32.f16 $3, d;
}"""
"""PTX that makes four numbers in float32 of a word of 8-bit ones, for compute capability 8.9 and above."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The rotary position of the token.

    cos, sin: of each dimension of a head, [D]. The halves of D turn together.
    """

    cos: Tensor
    sin: Tensor

    def fits(self, weight: Weight, dtype: torch.dtype) -> bool:
        """Return whether a weight has rows of whole heads, which the kernel can turn."""
        alike = self.cos.shape == self.sin.shape and self.cos.dtype == self.sin.dtype == dtype and self.cos.ndim == 1
        whole = self.cos.is_contiguous() and self.sin.is_contiguous() and len(self.cos) % 2 == 0
        return alike and whole and weight.shape[0] % len(self.cos) == 0 and not isinstance(weight, Int4Weight)


def definition(
    x: Tensor,
    weights: Sequence[Weight],
    biases: Sequence[Tensor | None],
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    gate: Activation | None = None,
    turn: Turn | None = None,
) -> list[Tensor]:
    """Return x W' + b for each weight W [N, K] and bias b [N] or None.

    x: one token, [1, K]. With a norm it is normalised first.
    residual: [1, N]. It is added to the rounded product.
    gate: return activation(x W0') * (x W1') of two weights of one shape instead.
    turn: turn the first two results, queries and keys.
    """
    x = x if norm is None else rms_norm.definition(x, norm)
    found = [F.linear(x, dense(weight, x.dtype), bias) for weight, bias in zip(weights, biases, strict=True)]
    if gate is not None:
        found = [gated.definition(found[0], found[1], gate)]
    if turn is not None:
        query, key = (y.view(1, -1, 1, len(turn.cos)) for y in found[:2])
        turned = rotate.definition(query, key, turn.cos.view(1, 1, -1), turn.sin.view(1, 1, -1))
        found[:2] = [y.view_as(like) for y, like in zip(turned, found, strict=False)]
    return found if residual is None else [residual + y for y in found]


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.chain import follow
    from kvthaw.kernels.linear_parts import biased, finish, part, turned
    from kvthaw.kernels.rms_norm import scaled

    @triton.jit
    def _load(weight, row, n, tile, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
        # A block [BN, BK] of a weight [n, K], from column tile * BK.
        column = tile * BK + tl.arange(0, BK)
        at = weight + row.to(tl.int64)[:, None] * K + column[None, :]
        inside = (row < n)[:, None]
        if K % BK:
            inside = inside & (column < K)[None, :]
        return tl.load(at, mask=inside, other=0, eviction_policy="evict_first")

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
    def _fours(part, BK: tl.constexpr, FOURS: tl.constexpr):
        # A part of the token, or four tensors [BK / 4] of every fourth number.
        if FOURS:
            even, odd = tl.split(tl.reshape(part, (BK // 4, 2, 2)))
            first, third = tl.split(even)
            second, fourth = tl.split(odd)
            found = (first, second, third, fourth)
        else:
            found = (part,)  # type: ignore[assignment]
        return found

    @triton.jit
    def _eight(word, PLACE: tl.constexpr):
        # The 8-bit number in some byte of words, in float32; NaN becomes 480.
        byte = word >> (8 * PLACE)
        return (((byte & 0x80) << 8) | ((byte & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0

    @triton.jit
    def _times(sums, tile, token, FOURS: tl.constexpr, CONVERT: tl.constexpr, FIRST: tl.constexpr):
        # The products of a block with its part of the token, added to sums unless FIRST.
        if FOURS:
            if CONVERT is None:
                a, b, c, d = _eight(tile, 0), _eight(tile, 1), _eight(tile, 2), _eight(tile, 3)
            else:
                a, b, c, d = tl.inline_asm_elementwise(
                    CONVERT, "=f,=f,=f,=f,r", [tile], (tl.float32, tl.float32, tl.float32, tl.float32), True, 1
                )
            found = a * token[0][None, :]
            if not FIRST:
                found = sums + found
            found += b * token[1][None, :]
            found += c * token[2][None, :]
            found += d * token[3][None, :]
        else:
            found = tile.to(tl.float32) * token[0][None, :]
            if not FIRST:
                found = sums + found
        return found

    @triton.jit
    def _product(weight, first, row, n, x, norm, scale, offset, token, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                 NORM: tl.constexpr, LATE: tl.constexpr, FOURS: tl.constexpr, CONVERT: tl.constexpr):  # fmt: skip
        # Rows of a weight times the token, [BN] in float32. first: the block of the first columns; token: their part of x.
        TILES: tl.constexpr = (K + BK - 1) // BK
        EACH: tl.constexpr = 4 if FOURS else 1
        if TILES == 1:
            sums = _times(0.0, first, token, FOURS, CONVERT, True)
        else:
            tile = first
            sums = tl.zeros((BN, BK // EACH), tl.float32)
            for i in tl.static_range(TILES):
                following = tile
                if i + 1 < TILES:
                    following = _load(weight, row, n, i + 1, K // EACH, BN, BK // EACH)
                part = token
                if i > 0:
                    part = _fours(_token(x, norm, scale, offset, i, K, BK, NORM, LATE), BK, FOURS)
                sums = _times(sums, tile, part, FOURS, CONVERT, False)
                tile = following
        return tl.sum(sums, axis=1)

    @triton.jit
    def _weighed(y, scale, row, n, SCALES: tl.constexpr):
        # Products times their rows' scales (1), or the scale of all rows (2).
        if SCALES == 1:
            y *= tl.load(scale + row, mask=row < n, other=0.0)
        if SCALES == 2:
            y *= tl.load(scale)
        return y

    @triton.jit
    def _rows(block, straight, BN: tl.constexpr, HALF: tl.constexpr):
        # The rows of a block: adjacent ones, or pairs of a head's dimensions that turn together, unless straight.
        row = block * BN + tl.arange(0, BN)
        if HALF:
            pair = row // 2
            row = tl.where(straight, row, pair // HALF * (2 * HALF) + pair % HALF + HALF * (row % 2))
        return row

    @triton.jit
    def _linear(out0, out1, out2, x, norm, residual, cos, sin, w0, w1, w2, s0, s1, s2, b0, b1, b2, n0, n1, n2, eps, offset,
                K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr,
                NORM: tl.constexpr, LATE: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, SCALES: tl.constexpr,
                CONVERT: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
        # Program: every tl.num_programs(0)th block of BN rows, of the weights one after the other. With SCALES weights are words
        # of four 8-bit numbers, which CONVERT converts.
        FOURS: tl.constexpr = SCALES > 0
        EACH: tl.constexpr = 4 if FOURS else 1
        TILES: tl.constexpr = (K + BK - 1) // BK
        block, step = tl.program_id(0), tl.num_programs(0)
        end0 = tl.cdiv(n0, BN)
        end1 = end0 + (tl.cdiv(n1, BN) if PARTS > 1 else 0)
        blocks = end1 + (tl.cdiv(n2, BN) if PARTS > 2 else 0)
        weight, n, start = part(block, w0, w1, w2, n0, n1, n2, end0, end1, PARTS)
        row = _rows(block - start, block >= end1, BN, HALF)
        tile = _load(weight, row, n, 0, K // EACH, BN, BK // EACH)
        if GATED:
            upper = _load(w1, row, n, 0, K // EACH, BN, BK // EACH)
        follow(PDL)
        scale = 1.0
        if NORM:
            squares = tl.zeros((BK,), tl.float32)
            for i in tl.static_range(TILES):
                piece = _token(x, norm, scale, offset, i, K, BK, False, LATE)
                squares += piece * piece
            scale = tl.rsqrt(tl.sum(squares) / K + eps)
        token = _fours(_token(x, norm, scale, offset, 0, K, BK, NORM, LATE), BK, FOURS)
        for current in tl.range(block, blocks, step):
            here, here_n, here_tile, here_row = weight, n, tile, row
            coming = current + step
            weight, n, start = part(coming, w0, w1, w2, n0, n1, n2, end0, end1, PARTS)
            row = _rows(coming - start, coming >= end1, BN, HALF)
            tile = _load(weight, row, n, 0, K // EACH, BN, BK // EACH)
            y = _product(
                here, here_tile, here_row, here_n, x, norm, scale, offset, token, K, BN, BK, NORM, LATE, FOURS, CONVERT
            )
            kind = out0.dtype.element_ty
            out, _, _ = part(current, out0, out1, out2, n0, n1, n2, end0, end1, PARTS)
            bias, _, _ = part(current, b0, b1, b2, n0, n1, n2, end0, end1, PARTS)
            scales, _, _ = part(current, s0, s1, s2, n0, n1, n2, end0, end1, PARTS)
            y = biased(_weighed(y, scales, here_row, here_n, SCALES), bias, here_row, here_n, kind, BIAS)
            if HALF:
                y = turned(y, here_row, cos, sin, current >= end1, HALF)
            up = y
            if GATED:
                here_upper = upper
                upper = _load(w1, row, n, 0, K // EACH, BN, BK // EACH)
                up = _product(
                    w1, here_upper, here_row, here_n, x, norm, scale, offset, token, K, BN, BK, NORM, LATE, FOURS, CONVERT
                )
                up = biased(_weighed(up, s1, here_row, here_n, SCALES), b1, here_row, here_n, kind, BIAS)
            finish(y, up, out, residual, here_row, here_n, GATED, SILU, ADD)


def launch(
    x: Tensor,
    weights: Sequence[Weight],
    biases: Sequence[Tensor | None],
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    gate: Activation | None = None,
    turn: Turn | None = None,
    blocks: Blocks | None = None,
) -> list[Tensor]:
    """Launch the Triton kernel; arguments and results as in `definition`, for up to three weights of one kind.

    All biases are given or none. A turn fits the first two weights. Everything is contiguous. x, norm, biases, residual and
    plain weights have one dtype.
    """
    width, parts = x.shape[-1], 1 if gate else len(weights)
    given = [bias for bias in biases if bias is not None]
    assert len(given) in (0, len(weights)) and len(weights) == (2 if gate else parts) and parts <= 3
    assert x.numel() == width and all(t.is_contiguous() and t.dtype == x.dtype for t in (x, *given))
    assert all(weight.shape[1] == width and readable(weight, x.dtype) for weight in weights)
    assert len({kind_of(weight) for weight in weights}) == 1 and not (residual is not None and parts > 1)
    assert turn is None or (parts == 3 and all(turn.fits(weight, x.dtype) for weight in weights[:2]))
    int4 = [weight for weight in weights if isinstance(weight, Int4Weight)]
    if int4:
        return linear_int4.launch(x, int4, given, norm=norm, residual=residual, gate=gate, blocks=blocks)
    eights = [weight for weight in weights if isinstance(weight, Float8Weight)]
    scales = [weight.scale for weight in eights]
    plain = [weight.codes.view(torch.int32) for weight in eights] or [one for one in weights if isinstance(one, Tensor)]
    out = [x.new_empty((*x.shape[:-1], len(weight))) for weight in plain[:parts]]
    how = blocks or blocks_of(weights[0], gated=gate is not None)
    total = sum(triton.cdiv(len(weight), how.rows) for weight in plain[:parts])
    w, b, o = [*plain, plain[0], plain[0]], [*given, *[x] * 3], [*out, out[0], out[0]]
    cos, sin = (x, x) if turn is None else (turn.cos, turn.sin)
    s, single = [*scales, *[scales[0] if scales else x] * 3], bool(scales) and len(scales[0]) < len(plain[0])
    _linear[(how.launched(total, x.device),)](
        *o[:3], x, x if norm is None else norm.weight, x if residual is None else residual, cos, sin, *w[:3], *s[:3], *b[:3],
        *(len(weight) for weight in w[:3]), *((0.0, 0.0) if norm is None else (norm.eps, norm.offset)),
        K=width, BN=how.rows, BK=how.width, PARTS=parts, GATED=gate is not None, SILU=gate == "silu",
        NORM=norm is not None, LATE=norm is not None and norm.late, ADD=residual is not None, BIAS=bool(given),
        SCALES=2 if single else int(bool(scales)),
        CONVERT=_CONVERT if nvidia(x.device, (8, 9)) else None, HALF=0 if turn is None else len(cos) // 2, num_warps=how.warps,
        **dependent(x.device),
    )  # fmt: skip
    return out


def blocks_for(width: int, *, gated: bool) -> Blocks:
    """Return how a kernel divides weights of this width: 16 KB a block, where an H200 was fastest."""
    tensors = 2 if gated else 1
    if width <= 4096:
        columns = triton.next_power_of_2(width)
        return Blocks(max(1, 8192 // columns // tensors), columns, 4, 4)
    return Blocks(2 // tensors, 2048, 8 // tensors, 4) if width <= 8192 else Blocks(2 // tensors, 4096, 2, 8)


def float8_blocks(width: int, *, gated: bool) -> Blocks:
    """Return how a kernel divides 8-bit weights of this width: 128 numbers a thread, so that 16 warps of a multiprocessor hold two
    blocks each in their registers. A program holds a whole token of up to 16,384 numbers."""
    columns = min(16384, triton.next_power_of_2(width))
    warps = max(4, columns // 1024)
    rows = 4096 * warps // columns // (2 if gated else 1)
    return Blocks(rows if width <= columns else rows // 2, columns, 16 // warps, warps)


def blocks_of(weight: Weight, *, gated: bool) -> Blocks:
    """Return how a kernel divides a weight, or two that have a gate."""
    if isinstance(weight, Int4Weight):
        return linear_int4.blocks_for(weight.codes.shape[1] * TILE, gated=gated)
    return (float8_blocks if isinstance(weight, Float8Weight) else blocks_for)(weight.shape[1], gated=gated)


linear = by_device(launch, definition)
