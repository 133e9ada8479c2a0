"""How blocks store a row, one token of one KV head: in the model's dtype, or as e4m3 with one scale for K and one for V.

A stored row of 8 bits is [scale of K, scale of V] in float32, then the codes of K and of V. Zeros fill it up to a multiple
of 8 bytes. For D = 128 that is 264 bytes, 52 % of the 512 of bf16. A scale is the least power of two, 2^-95 at least, by
which no magnitude exceeds 448, e4m3's largest. Decoding is therefore exact in bf16, float16 and float32, and encoding a
decoded row restores the same codes. Scales that are powers of two cost e4m3 only range; float16 beyond 63,488 is rounded to
infinity. If an element of K or V is not finite, the scale is NaN, and all of that K or V decodes to NaN. Kernels convert
with integer arithmetic, since cards before sm_89 have no instructions for e4m3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvthaw.config import KvDtype
from kvthaw.kernels import HAS_TRITON

HEADER = 8
"""Bytes of the two scales."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Rows [2, D] as they come from the model, K then V."""

    dim: int
    dtype: torch.dtype
    fp8: ClassVar[bool] = False

    @property
    def tail(self) -> tuple[int, ...]:
        """The shape of a stored row."""
        return 2, self.dim

    @property
    def stored(self) -> torch.dtype:
        """The dtype of a tensor of stored rows."""
        return self.dtype

    @property
    def element(self) -> torch.dtype:
        """What a number of K is stored as."""
        return self.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored row, scales included."""
        return 2 * self.dim * self.dtype.itemsize

    def encode(self, rows: Tensor) -> Tensor:
        """Return rows [..., 2, D] as they are stored, [..., *tail]."""
        return rows

    def decode(self, stored: Tensor) -> Tensor:
        """Return stored rows [..., *tail] as [..., 2, D]."""
        return stored

    def decode_keys(self, stored: Tensor) -> Tensor:
        """Return the keys [..., D] of stored rows."""
        return stored[..., 0, :]

    def rounded(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [..., D] as they are once they were stored."""
        return keys, values

    def convert(self, stored: Tensor) -> Tensor:
        """Return stored rows in this format, from rows stored in this format or in the other."""
        return E4M3(self.dim, self.dtype).decode(stored) if stored.dtype == torch.uint8 else stored


@dataclass(frozen=True, slots=True)
class E4M3(RowFormat):
    """Rows of 8 bits a number: see the module."""

    fp8: ClassVar[bool] = True

    @property
    def tail(self) -> tuple[int, ...]:
        return (HEADER + -(-2 * self.dim // 8) * 8,)

    @property
    def stored(self) -> torch.dtype:
        return torch.uint8

    @property
    def element(self) -> torch.dtype:
        return torch.float8_e4m3fn

    @property
    def row_bytes(self) -> int:
        return self.tail[0]

    def encode(self, rows: Tensor) -> Tensor:
        return encode(rows, self.tail[0]) if HAS_TRITON and rows.is_cuda else definition(rows, self.tail[0])

    def decode(self, stored: Tensor) -> Tensor:
        return self._decoded(stored, 2)

    def decode_keys(self, stored: Tensor) -> Tensor:
        return self._decoded(stored, 1)[..., 0, :]

    def rounded(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.decode(self.encode(torch.stack((keys, values), dim=-2)))
        return rows[..., 0, :], rows[..., 1, :]

    def convert(self, stored: Tensor) -> Tensor:
        return stored if stored.dtype == torch.uint8 else self.encode(stored)

    def _decoded(self, stored: Tensor, parts: int) -> Tensor:
        # torch takes 20 times as long on a CPU; float16 has the same bits with another bias of the exponent.
        bits = stored[..., HEADER : HEADER + parts * self.dim].to(torch.int16)
        sign = (bits << 8).bitwise_and_(-1 << 15)
        halves = bits.bitwise_and_(0x7F).bitwise_left_shift_(7).bitwise_or_(sign).view(torch.float16)
        wide = torch.float32 if self.dtype == torch.float16 else self.dtype  # which holds all scales
        scales = stored[..., : 4 * parts].contiguous().view(torch.float32) * 256
        rows: Tensor = halves.to(wide).unflatten(-1, (parts, self.dim)).mul_(scales.to(wide)[..., None])
        return rows.to(self.dtype)


def row_format(kv_dtype: KvDtype | None, dim: int, dtype: torch.dtype) -> RowFormat:
    """Return the format of a `kv_dtype`; None: the model's dtype."""
    return RowFormat(dim, dtype) if kv_dtype is None else E4M3(dim, dtype)


def copying(slab: Tensor, format: RowFormat | None) -> tuple[Tensor, int, dict[str, Any]]:
    """Return how a kernel copies rows between a slab [B, H, N, 2, D] and blocks of a format, None for the slab's own: the slab as
    it reads it, how many numbers a stored row is, and its constants. DIM: of rows that are e4m3; others are 32-bit words."""
    row_bytes = 2 * slab.shape[4] * slab.element_size()
    if format is not None and format.fp8:
        words, width, dim, block = slab, format.row_bytes, format.dim, triton.next_power_of_2(format.dim)
    else:
        assert row_bytes % 4 == 0, "rows are copied in 32-bit words"
        words, width, dim, block = (
            slab.view(torch.int32),
            row_bytes // 4,
            None,
            min(1024, triton.next_power_of_2(row_bytes // 4)),
        )
    how = {"BLOCK": block, "ALIGN": 16 if row_bytes % 16 == 0 else 4, "DIM": dim, "num_warps": 1 if block <= 256 else 4}
    return words, width, how


def definition(rows: Tensor, row_bytes: int) -> Tensor:
    """Return rows [..., 2, D] as e4m3, [..., row_bytes] uint8."""
    x, dim = rows.float(), rows.shape[-1]
    most = torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True).nan_to_num(torch.inf, torch.inf)
    exponent = ((most.view(torch.int32) + 0x1FFFFF) >> 23).clamp(40, 254)  # of 256 scales; 448 is 1.75 * 256
    scale = ((exponent - 8) << 23).view(torch.float32)
    codes = (x / scale).clamp_(-448, 448).to(torch.float8_e4m3fn)
    stored = torch.zeros((*rows.shape[:-2], row_bytes), dtype=torch.uint8, device=rows.device)
    stored[..., :HEADER] = torch.where(most.isinf(), torch.nan, scale).flatten(-2).view(torch.uint8)
    stored[..., HEADER : HEADER + 2 * dim] = codes.flatten(-2).view(torch.uint8)
    return stored


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def scales(x, AXIS: tl.constexpr):
        # Return the scale of each part along an axis of x, float32, and what x is multiplied by.
        most = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=AXIS)
        finite = most < 0x7F800000
        exponent = tl.minimum(tl.maximum((tl.where(finite, most, 0) + 0x1FFFFF) >> 23, 40), 254)
        scale = ((exponent - 8) << 23).to(tl.float32, bitcast=True)
        return tl.where(finite, scale, float("nan")), ((262 - exponent) << 23).to(tl.float32, bitcast=True)

    @triton.jit
    def to_codes(y):
        # Round float32 numbers to e4m3, to even; those beyond 448 become 448.
        bits = y.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
        small = (tl.abs(y) + 16384.0).to(tl.int32, bitcast=True) & 0xFF  # whole multiples of 2^-9
        code = tl.minimum(tl.where(size < 0x3C800000, small, normal), 0x7E)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)

    @triton.jit
    def to_numbers(codes):
        # Return codes as 1/256 of their numbers, float32: float16 has the same bits with another bias of the exponent.
        bits = codes.to(tl.int32)
        return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)

    @triton.jit
    def load_codes(rows, known, d, PART: tl.constexpr, DIM: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr):
        # Return K (PART 0) or V (1) of rows at byte addresses [N] int64 as exact numbers [N, d] of dtype KIND, and each
        # row's scale, float32 [N]. Both are 0 where known [N] is False. NATIVE: decode with the GPU's instruction.
        scale = tl.load((rows + 4 * PART).to(tl.pointer_type(tl.float32)), mask=known, other=0.0)
        at = tl.multiple_of(rows.to(tl.pointer_type(tl.uint8)), 8)[:, None] + (8 + PART * DIM) + d[None, :]
        codes = tl.load(at, mask=known[:, None] & (d < DIM)[None, :], other=0)
        if NATIVE and tl.bfloat16 == KIND:
            # Not pure for the compiler, which would move it behind shared memory and read that byte by byte.
            numbers = tl.inline_asm_elementwise(
                """{
                .reg .b16 low, high, a, b;
                .reg .b32 two;
                .reg .f32 x, y;
                mov.b32 {low, high}, $2;
                cvt.rn.f16x2.e4m3x2 two, low;
                mov.b32 {a, b}, two;
                cvt.f32.f16 x, a;
                cvt.f32.f16 y, b;
                cvt.rn.bf16x2.f32 $0, y, x;
                cvt.rn.f16x2.e4m3x2 two, high;
                mov.b32 {a, b}, two;
                cvt.f32.f16 x, a;
                cvt.f32.f16 y, b;
                cvt.rn.bf16x2.f32 $1, y, x;
                }""",
                "=r,=r,r", [codes], tl.bfloat16, False, 4,
            )  # fmt: skip
        elif NATIVE:
            numbers = codes.to(tl.float8e4nv, bitcast=True).to(KIND)
        else:
            numbers, scale = to_numbers(codes).to(KIND), scale * 256
        return numbers, scale

    @triton.jit
    def load_part(rows, known, d, PART: tl.constexpr, DIM: tl.constexpr):
        # Return K (PART 0) or V (1) of rows at byte addresses [N] int64, float32 [N, d]; 0 where not known [N].
        numbers, scale = load_codes(rows, known, d, PART, DIM, tl.float32, False)
        return numbers * scale[:, None]

    @triton.jit
    def store_part(rows, known, x, d, PART: tl.constexpr, DIM: tl.constexpr):
        # Store x [N, d] float32, 0 beyond DIM, as K or V of rows at byte addresses [N] int64. Return what load_part() will.
        scale, inverse = scales(x, 1)
        codes = to_codes(x * inverse[:, None])
        tl.store((rows + 4 * PART).to(tl.pointer_type(tl.float32)), scale, mask=known)
        place = tl.multiple_of(rows.to(tl.pointer_type(tl.uint8)), 8)[:, None] + (8 + PART * DIM) + d[None, :]
        tl.store(place, codes, mask=known[:, None] & (d < DIM)[None, :])
        return to_numbers(codes) * (scale * 256)[:, None]

    @triton.jit
    def copy_words(source, target, width, BLOCK: tl.constexpr):
        # Copy a row of 32-bit words.
        for start in range(0, width, BLOCK):
            words = start + tl.arange(0, BLOCK)
            tl.store(target + words, tl.load(source + words, mask=words < width), mask=words < width)

    @triton.jit
    def _encode(rows, stored, count, row_bytes, ROWS: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr):
        # Program: ROWS rows.
        i, d = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64), tl.arange(0, DP)
        known = i < count
        to = stored.to(tl.int64) + i * row_bytes
        for part in tl.static_range(2):
            source = rows + i[:, None] * (2 * DIM) + part * DIM + d[None, :]
            x = tl.load(source, mask=known[:, None] & (d < DIM)[None, :], other=0.0)
            store_part(to, known, x.to(tl.float32), d, part, DIM)


def encode(rows: Tensor, row_bytes: int) -> Tensor:
    """Launch the kernel: as `definition`, on the current stream, without a sync."""
    rows, dim = rows.contiguous(), rows.shape[-1]
    stored = torch.empty((*rows.shape[:-2], row_bytes), dtype=torch.uint8, device=rows.device)
    stored[..., HEADER + 2 * dim :] = 0
    count, tile = rows.numel() // (2 * dim), 16
    if count:
        _encode[(triton.cdiv(count, tile),)](rows, stored, count, row_bytes, ROWS=tile, DIM=dim, DP=triton.next_power_of_2(dim))
    return stored
