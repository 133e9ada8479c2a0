"""PTX that multiplies 4-bit numbers with a token on tensor cores, for the kernel in linear_int4.py.

A warp has two tiles of 8 rows and 128 columns (weights.py), each as four words of each thread, and the token's 128 numbers. In
thread l, let g = l // 4 and t = l % 4. The thread has numbers of row g of both tiles. One instruction makes two numbers 128 + q
of bfloat16 from bits 0 to 3 and 16 to 19 of a word; other bits need a shift before. The instruction m16n8k16 takes them from this
thread for its first operand. All columns of the second operand are the token, so all four threads of a row get the whole sums.

Triton passes one-dimensional tensors, and the thread must hold elements 4 l to 4 l + 3 of every 128; with any other layout the code
traps. Each function returns the instructions and their constraints.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kvthaw.kernels.gpu import nvidia

ABOVE = 128
"""What tensor cores multiply is greater than the number by this."""
WORDS = 4
"""Words of a thread, of 8 numbers each."""


@functools.cache
def product() -> tuple[str, str]:
    """Return code for the sums of rows, in float32, each over the 32 columns of a word.

    In: words of a tile [4] and of another [4]; the token, four tensors [4]; the elements' indices [4]. Element j of tensor p of the
    token has columns 32 j + 8 p + 2 t and the one behind it. Out: sums of rows of the tiles, [4] each.
    """
    tiles, token, element = (2 * WORDS, 3 * WORDS), 4 * WORDS, 8 * WORDS
    lines = [".reg .b32 a<4>, b<4>, u, lane;", ".reg .f32 s<4>, zero;", *_laid_out(element), "mov.f32 zero, 0f00000000;"]
    for j in range(WORDS):
        for name, first in zip("ab", tiles, strict=True):
            for p in range(4):
                word = f"${first + j}"
                if p:
                    lines.append(f"shr.u32 u, {word}, {4 * p};")
                    word = "u"
                lines.append(f"lop3.b32 {name}{p}, {word}, 0x000F000F, 0x43004300, 0xEA;")  # (x & y) | z
        lines += _multiplied([(f"a{p}", f"b{p}") for p in range(4)], f"${j}", f"${WORDS + j}", token + j)
    return _whole(lines, 2 * WORDS, 7 * WORDS)


@functools.cache
def total() -> tuple[str, str]:
    """Return code for the sum of a token's numbers over the 32 columns of each word, in all threads.

    In: the token, four tensors [4], and the elements' indices [4]. Out: [4].
    """
    token, element = WORDS, 5 * WORDS
    lines = [".reg .b32 one, u, lane;", ".reg .f32 s<4>, zero;", *_laid_out(element), "mov.f32 zero, 0f00000000;"]
    lines.append("mov.b32 one, 0x3F803F80;")
    for j in range(WORDS):
        lines += _multiplied([("one", "one")] * 4, f"${j}", "s2", token + j)
    return _whole(lines, WORDS, 5 * WORDS)


def native(device: torch.device) -> bool:
    """Return whether a device has these instructions (compute capability 8.0 and above)."""
    return nvidia(device, (8, 0))


def _multiplied(rows: Sequence[tuple[str, str]], upper: str, lower: str, token: int) -> list[str]:
    """Multiply 32 columns: `upper` gets the sums of rows g, `lower` the sums of rows g + 8."""
    kind = "m16n8k16.row.col.f32.bf16.bf16.f32"
    lines, before = [], "{zero, zero, zero, zero}"
    for half, to in enumerate(("{s0, s1, s2, s3}", f"{{{upper}, s1, {lower}, s3}}")):
        (a, b), (c, d) = rows[2 * half : 2 * half + 2]
        column = f"{{${token + 2 * half * WORDS}, ${token + (2 * half + 1) * WORDS}}}"
        lines.append(f"mma.sync.aligned.{kind} {to}, {{{a}, {b}, {c}, {d}}}, {column}, {before};")
        before = to
    return lines


def _laid_out(register: int) -> list[str]:
    """Trap unless the first of a thread's four elements is 4 lane of 128."""
    lines = ["mov.u32 lane, %laneid;", "shl.b32 u, lane, 2;", f"xor.b32 u, u, ${register};", "and.b32 u, u, 127;"]
    return [".reg .pred off;", *lines, "setp.ne.u32 off, u, 0;", "@off trap;"]


def _whole(lines: Sequence[str], out: int, given: int) -> tuple[str, str]:
    return "{\n" + "\n".join(lines) + "\n}", ",".join(["=&f"] * out + ["r"] * given)
