"""Linear layers of one token whose weights have 4 bits, in torch's tiles for tensor cores; see linear.py.

Bytes and operations: a number has 0.53 bytes with its scale and zero in groups of 128. At 4.4 TB/s an H200 loads 8.3e12 numbers in
a second. Its schedulers issue 33e12 instructions of threads at 1.98 GHz, 4 a number. Shifts and other bit operations have half
that rate. Converting a number to float32 and adding it takes three instructions, two of them bit operations. Tensor cores take
1.1: seven bit operations make eight numbers of bfloat16 in the layout that they need, and one instruction multiplies 256.

y = sum over groups of s (sum (q - 8) x) + z (sum x). Tensor cores multiply 128 + q, so the kernel computes s (sum (128 + q) x) +
(z - 136 s) (sum x). Products of bfloat16 are exact, and sums are float32. The sums of the token are the same for all rows. A
program that holds the whole token computes them once.

Each program takes one or two pairs of rows of tiles, 16 or 32 rows of the weight, and distributes columns over its warps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON, nibbles, rms_norm
from kvthaw.kernels.chain import dependent
from kvthaw.kernels.gated import Activation
from kvthaw.kernels.linear_parts import Blocks
from kvthaw.kernels.rms_norm import Norm
from kvthaw.kernels.weights import TILE, Int4Weight

ROWS = 16
"""Rows of a weight in a pair of rows of tiles."""

if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.chain import follow
    from kvthaw.kernels.linear_parts import biased, finish, part
    from kvthaw.kernels.rms_norm import scaled

    @triton.jit
    def _codes(weight, block, n, tile, P: tl.constexpr, BK: tl.constexpr, PAIRS: tl.constexpr):
        # Words [BK] of a block's rows of tiles, from word tile * BK of them. A row of tiles has P words.
        e = tl.arange(0, BK)
        first = block * (2 * PAIRS)
        start = weight + (first.to(tl.int64) * P + tile * BK)
        found = ()
        for q in tl.static_range(2 * PAIRS):
            inside = (first + q) * 8 < n
            if P != BK:
                inside = inside & (e < P - tile * BK)
            found += (tl.load(start + q * P + e, mask=inside, other=0, eviction_policy="evict_first"),)  # type: ignore[assignment]
        return found

    @triton.jit
    def _scales(scale, block, n, tile, P: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
                PAIRS: tl.constexpr):  # fmt: skip
        # The scales and zeros [BK / SPAN] of a block's rows of tiles, a word each, for every SPAN words. GROUP divides BK.
        high = (n + 7) // 8 * 8
        e = tl.arange(0, BK // SPAN) * SPAN
        at = (e // 128 * 128 + e % 4 * 32) // GROUP * high + e // 4 % 32 // 4
        first = block * (16 * PAIRS)
        start = scale + (tile * (BK // GROUP) * high + first)
        found = ()
        for q in tl.static_range(2 * PAIRS):
            inside = first + 8 * q < n
            if P != BK:
                inside = inside & (e < P - tile * BK)
            found += (tl.load(start + at + 8 * q, mask=inside, other=0),)  # type: ignore[assignment]
        return found

    @triton.jit
    def _token(x, norm, by, offset, tile, K: tl.constexpr, BK: tl.constexpr, SPAN: tl.constexpr, NORM: tl.constexpr,
               LATE: tl.constexpr, PLAIN: tl.constexpr, TOTAL: tl.constexpr, TOTAL_TYPES: tl.constexpr):  # fmt: skip
        # The token's numbers for words [BK] of a row of tiles: pairs of bfloat16 in four words, as the norm rounds them, and
        # their sum for every SPAN words. The four threads of a row have parts of the sum if PLAIN, else each has all of it.
        e = tl.arange(0, BK)
        pairs = ()
        sums = tl.zeros((BK,), tl.float32)
        first = tile * (BK // 2)
        for p in tl.static_range(4):
            pair = e // 128 * 64 + e % 4 * 16 + e // 4 % 4 + 4 * p
            found = _pair(x + first, pair, K // 2 - first, K % BK == 0)
            if NORM:
                weight = _pair(norm + first, pair, K // 2 - first, K % BK == 0)
                low = scaled(_low(found), by, _low(weight), offset, tl.bfloat16, LATE).to(tl.bfloat16)
                high = scaled(_high(found), by, _high(weight), offset, tl.bfloat16, LATE).to(tl.bfloat16)
                low, high = low.to(tl.int16, bitcast=True).to(tl.int32), high.to(tl.int16, bitcast=True).to(tl.int32)
                found = (low & 0xFFFF) | (high << 16)
            if PLAIN:
                sums += _low(found) + _high(found)
            pairs += (found,)  # type: ignore[assignment]
        if not PLAIN:
            given = pairs
            given += (e,)  # type: ignore[assignment]
            sums = tl.inline_asm_elementwise(TOTAL, TOTAL_TYPES, given, tl.float32, True, 4)
        return pairs, _summed(sums, BK, SPAN)

    @triton.jit
    def _pair(x, at, n, WHOLE: tl.constexpr):
        return tl.load(x + at) if WHOLE else tl.load(x + at, mask=at < n, other=0)

    @triton.jit
    def _low(pair):
        return (pair << 16).to(tl.float32, bitcast=True)

    @triton.jit
    def _high(pair):
        return (pair & -65536).to(tl.float32, bitcast=True)

    @triton.jit
    def _summed(x, BK: tl.constexpr, SPAN: tl.constexpr):
        return x if SPAN == 1 else tl.sum(tl.reshape(x, (BK // SPAN, SPAN)), axis=1)

    @triton.jit
    def _plainly(words, pairs):
        # The products of single words with their numbers of the token, in any thread.
        found = tl.zeros(words.shape, tl.float32)
        for p in tl.static_range(4):
            found += ((words >> (4 * p)) & 15).to(tl.float32) * _low(pairs[p])
            found += ((words >> (4 * p + 16)) & 15).to(tl.float32) * _high(pairs[p])
        return found

    @triton.jit
    def _grouped(y, word, sums, ABOVE: tl.constexpr):
        # The sum of weights times the token, from the sum of ABOVE + q times the token.
        scale = _low(word)
        return scale * y + (_high(word) - (ABOVE + 8.0) * scale) * sums

    @triton.jit
    def _rows(codes, scales, pairs, sums, BK: tl.constexpr, SPAN: tl.constexpr, PAIRS: tl.constexpr, PLAIN: tl.constexpr,
              ABOVE: tl.constexpr, PRODUCT: tl.constexpr, PRODUCT_TYPES: tl.constexpr):  # fmt: skip
        # Parts [BK / SPAN] of the products of each row of tiles.
        found = ()
        for r in tl.static_range(PAIRS):
            if PLAIN:
                upper, lower = _plainly(codes[2 * r], pairs), _plainly(codes[2 * r + 1], pairs)
            else:
                given = (codes[2 * r], codes[2 * r + 1])
                given += pairs
                given += (tl.arange(0, BK),)
                upper, lower = tl.inline_asm_elementwise(PRODUCT, PRODUCT_TYPES, given, (tl.float32, tl.float32), True, 4)
            found += (_grouped(_summed(upper, BK, SPAN), scales[2 * r], sums, ABOVE),)  # type: ignore[assignment]
            found += (_grouped(_summed(lower, BK, SPAN), scales[2 * r + 1], sums, ABOVE),)  # type: ignore[assignment]
        return found

    @triton.jit
    def _product(weight, scale, codes, scales, block, n, x, norm, by, offset, pairs, sums, P: tl.constexpr, K: tl.constexpr,
                 BK: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr, PAIRS: tl.constexpr, PLAIN: tl.constexpr,
                 ABOVE: tl.constexpr, PRODUCT: tl.constexpr, PRODUCT_TYPES: tl.constexpr, TOTAL: tl.constexpr,
                 TOTAL_TYPES: tl.constexpr):  # fmt: skip
        # The products of a block's 16 PAIRS rows with the token. codes, scales: of the first words; pairs, sums: the token's for
        # them, if a row of tiles has no others.
        TILES: tl.constexpr = (P + BK - 1) // BK
        if TILES == 1:
            every = _rows(codes, scales, pairs, sums, BK, SPAN, PAIRS, PLAIN, ABOVE, PRODUCT, PRODUCT_TYPES)
        else:
            every = ()
            for _ in tl.static_range(2 * PAIRS):
                every += (tl.zeros((BK // SPAN,), tl.float32),)
            for i in tl.range(TILES):  # an unrolled loop would keep all addresses
                now, by_now = codes, scales
                codes = _codes(weight, block, n, i + 1, P, BK, PAIRS)
                scales = _scales(scale, block, n, i + 1, P, BK, GROUP, SPAN, PAIRS)
                pairs, sums = _token(x, norm, by, offset, i, K, BK, SPAN, False, False, PLAIN, TOTAL, TOTAL_TYPES)
                more = _rows(now, by_now, pairs, sums, BK, SPAN, PAIRS, PLAIN, ABOVE, PRODUCT, PRODUCT_TYPES)
                added = ()
                for q in tl.static_range(2 * PAIRS):
                    added += (every[q] + more[q],)  # type: ignore[assignment]
                every = added
        upper, lower = (every[0], every[1]) if PAIRS == 1 else (tl.join(every[0], every[2]), tl.join(every[1], every[3]))
        both = tl.join(upper, lower)
        both = tl.permute(tl.reshape(both, (BK // 128, 8, 16 // SPAN, 2 * PAIRS)), (3, 1, 0, 2))
        return tl.sum(tl.reshape(both, (16 * PAIRS, BK // 8 // SPAN)), axis=1) * (1.0 if PLAIN else 0.25)

    @triton.jit
    def _squares(x, K: tl.constexpr, BK: tl.constexpr):
        # The sum of the token's squares, of pairs.
        total = tl.zeros((BK // 2,), tl.float32)
        for first in tl.static_range(0, K // 2, BK // 2):
            pair = first + tl.arange(0, BK // 2)
            found = tl.load(x + pair, mask=pair < K // 2, other=0)
            total += _low(found) * _low(found) + _high(found) * _high(found)
        return tl.sum(total)

    @triton.jit
    def _linear_int4(out0, out1, out2, x, norm, residual, w0, w1, w2, s0, s1, s2, b0, b1, b2, n0, n1, n2, eps, offset,
                     K: tl.constexpr, P: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr,
                     PARTS: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr, NORM: tl.constexpr, LATE: tl.constexpr,
                     ADD: tl.constexpr, BIAS: tl.constexpr, PLAIN: tl.constexpr, ABOVE: tl.constexpr, PRODUCT: tl.constexpr,
                     PRODUCT_TYPES: tl.constexpr, TOTAL: tl.constexpr, TOTAL_TYPES: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
        # Program: every tl.num_programs(0)th block of PAIRS pairs of rows of tiles, of the weights one after the other. x and norm
        # are words of two numbers. NORM needs BK = P.
        SPAN: tl.constexpr = 4 if GROUP >= 128 else GROUP // 32
        ROWS: tl.constexpr = 16 * PAIRS
        block, step = tl.program_id(0), tl.num_programs(0)
        end0 = tl.cdiv(n0, ROWS)
        end1 = end0 + (tl.cdiv(n1, ROWS) if PARTS > 1 else 0)
        blocks = end1 + (tl.cdiv(n2, ROWS) if PARTS > 2 else 0)
        weight, n, start = part(block, w0, w1, w2, n0, n1, n2, end0, end1, PARTS)
        scale, _, _ = part(block, s0, s1, s2, n0, n1, n2, end0, end1, PARTS)
        codes = _codes(weight, block - start, n, 0, P, BK, PAIRS)
        scales = _scales(scale, block - start, n, 0, P, BK, GROUP, SPAN, PAIRS)
        if GATED:
            up_codes, up_scales = _codes(w1, block, n, 0, P, BK, PAIRS), _scales(s1, block, n, 0, P, BK, GROUP, SPAN, PAIRS)
        follow(PDL)
        by = 1.0
        if NORM:
            by = tl.rsqrt(_squares(x, K, BK) / K + eps)
        pairs, sums = _token(x, norm, by, offset, 0, K, BK, SPAN, NORM, LATE, PLAIN, TOTAL, TOTAL_TYPES)
        for current in tl.range(block, blocks, step):
            here, here_scale, here_n, here_block, now, by_now = weight, scale, n, current - start, codes, scales
            coming = current + step
            weight, n, start = part(coming, w0, w1, w2, n0, n1, n2, end0, end1, PARTS)
            scale, _, _ = part(coming, s0, s1, s2, n0, n1, n2, end0, end1, PARTS)
            codes = _codes(weight, coming - start, n, 0, P, BK, PAIRS)
            scales = _scales(scale, coming - start, n, 0, P, BK, GROUP, SPAN, PAIRS)
            y = _product(here, here_scale, now, by_now, here_block, here_n, x, norm, by, offset, pairs, sums, P, K, BK, GROUP,
                         SPAN, PAIRS, PLAIN, ABOVE, PRODUCT, PRODUCT_TYPES, TOTAL, TOTAL_TYPES)  # fmt: skip
            out, _, _ = part(current, out0, out1, out2, n0, n1, n2, end0, end1, PARTS)
            bias, _, _ = part(current, b0, b1, b2, n0, n1, n2, end0, end1, PARTS)
            kind = out0.dtype.element_ty
            row = here_block * ROWS + tl.arange(0, ROWS)
            y = biased(y, bias, row, here_n, kind, BIAS)
            up = y
            if GATED:
                now, by_now = up_codes, up_scales
                up_codes = _codes(w1, coming, n, 0, P, BK, PAIRS)
                up_scales = _scales(s1, coming, n, 0, P, BK, GROUP, SPAN, PAIRS)
                up = _product(w1, s1, now, by_now, here_block, here_n, x, norm, by, offset, pairs, sums, P, K, BK, GROUP, SPAN,
                              PAIRS, PLAIN, ABOVE, PRODUCT, PRODUCT_TYPES, TOTAL, TOTAL_TYPES)  # fmt: skip
                up = biased(up, b1, row, here_n, kind, BIAS)
            finish(y, up, out, residual, row, here_n, GATED, SILU, ADD)


def launch(
    x: Tensor,
    weights: Sequence[Int4Weight],
    biases: Sequence[Tensor],
    *,
    norm: Norm | None,
    residual: Tensor | None,
    gate: Activation | None,
    blocks: Blocks | None,
) -> list[Tensor]:
    """Launch the Triton kernel; arguments as in linear.launch.

    biases: one for each weight, or none.
    """
    width, parts, first = x.shape[-1], 1 if gate else len(weights), weights[0]
    filled = first.codes.shape[1] * TILE
    how, plain = blocks or blocks_for(filled, gated=gate is not None), not nibbles.native(x.device)
    words = min(how.width, triton.next_power_of_2(filled))
    warps = min(how.warps, words // 128)  # a thread must have four words
    assert x.dtype == torch.bfloat16 and how.rows in (1, 2) and words % 256 == 0
    if norm is not None and words < filled:  # each block would normalise the token once more
        x, norm = (rms_norm.launch if width <= rms_norm.MOST else rms_norm.definition)(x, norm), None
    out = [x.new_empty((*x.shape[:-1], weight.shape[0])) for weight in weights[:parts]]
    total = sum(triton.cdiv(weight.shape[0], ROWS * how.rows) for weight in weights[:parts])
    every = [*weights, first, first][:3]
    b, o = [*biases, *[x] * 3], [*out, out[0], out[0]]
    (product, product_types), (sums, sums_types) = nibbles.product(), nibbles.total()
    _linear_int4[(how.launched(total, x.device),)](
        *o[:3], _words(x), _words(x if norm is None else norm.weight), x if residual is None else residual,
        *(weight.codes for weight in every), *(_words(weight.scales) for weight in every), *b[:3],
        *(weight.shape[0] for weight in every), *((0.0, 0.0) if norm is None else (norm.eps, norm.offset)),
        K=width, P=filled, BK=words, GROUP=first.group, PAIRS=how.rows, PARTS=parts,
        GATED=gate is not None, SILU=gate == "silu", NORM=norm is not None, LATE=norm is not None and norm.late,
        ADD=residual is not None, BIAS=len(biases) > 0, PLAIN=plain, ABOVE=0 if plain else nibbles.ABOVE, PRODUCT=product,
        PRODUCT_TYPES=product_types, TOTAL=sums, TOTAL_TYPES=sums_types, num_warps=warps, **dependent(x.device),
    )  # fmt: skip
    return out


def blocks_for(filled: int, *, gated: bool) -> Blocks:
    """Return how a kernel divides rows of tiles of this number of words, which is the width rounded up.

    Of up to 4,096 words a program has the whole token in its registers. Of more it loads the token for each block again, and a
    block has 32 rows where registers suffice.
    """
    if filled > 4096:
        return Blocks(1 if gated else 2, 2048, 1, 16)
    words = triton.next_power_of_2(filled)
    warps = min(16, words // 128)
    return Blocks(1, words, 16 // warps, warps)


def _words(x: Tensor) -> Tensor:
    """Return pairs of 16-bit numbers as words, of a copy if the first one lies in the second half of a word."""
    return (x.clone() if x.storage_offset() % 2 else x).view(torch.int32)
