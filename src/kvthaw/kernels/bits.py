"""PTX that counts common bits of 128-bit vectors on tensor cores, for the kernel in signs.py.

A warp multiplies 16 rows by 8 columns of 128 bits. In thread l, let g = l // 4 and t = l % 4. The thread supplies bits 32 t
to 32 t + 31 of rows g and g + 8 and of column g. It receives columns 2 t and 2 t + 1 of rows g and g + 8. Triton passes
one-dimensional tensors, and the thread must hold elements 4 l to 4 l + 3 of every 128; with any other layout the code
traps.

Each function returns the instructions and their constraints: output registers $0 to $3, then four per input tensor, the last of
which holds the indices of its elements. The code depends only on the shape: fours, of query heads, and halves, of 16 subspaces
each.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kvthaw.kernels.gpu import nvidia

MOST, MIDDLE = 127, 64
"""The maximum of the votes, and the votes of a sum of 0."""


@functools.cache
def start(halves: int) -> tuple[str, str]:
    """Return code for the start value of each head's sum, duplicated in both halves of a word: minus half of the sum of its
    coordinates, plus `above`, so that no sum is negative. In: the heads' planes [block, half]; thread t receives head t's."""
    lines = [".reg .b32 c<4>, d<4>, ones, u, v, lane;", *_laid_out(4 + 8 * halves), "mov.b32 ones, -1;"]
    for block, name in enumerate("cd"):
        planes = [f"${4 + 4 * (block * halves + half)}" for half in range(halves)]
        lines += [f"mov.b32 {name}{i}, 0;" for i in range(4)]
        lines += [_product(name, ("ones", "ones"), plane, _four(name)) for plane in planes]
    lines += ["mad.lo.s32 c0, c1, 2, c0;", "mad.lo.s32 d0, d1, -2, d0;", "mad.lo.s32 v, d0, 4, c0;"]
    lines += ["shr.s32 v, v, 1;", f"sub.s32 v, {above(halves)}, v;", "mul.lo.s32 v, v, 0x10001;"]
    lines += [f"mov.b32 ${i}, v;" for i in range(4)]
    return _whole(lines, 2 * halves + 1)


@functools.cache
def votes(fours: int, halves: int, shift: int) -> tuple[str, str]:
    """Return code for the votes of keys 16 g + 4 t to 16 g + 4 t + 3 of 128 over all heads.

    In: ids [half, s] of 16 keys in subspace 16 half + 4 t + s, held by thread t of group g; planes [four, block, half]; starts
    [four].
    """
    ids, planes = 4, 4 + 16 * halves
    starts = planes + 8 * fours * halves
    lines = [
        f".reg .b32 x<4>, w<{4 * halves}>, c<4>, d<4>, p<8>, q<4>, zero<4>, u, v, lane;",
        ".reg .pred odd, high;",
        *_laid_out(starts + 4 * fours),
        *_parity(),
        *(f"mov.b32 zero{i}, 0;" for i in range(4)),
    ]
    for k in range(4):  # word k holds 4 of the 16 keys
        for half in range(halves):
            lines += _exchanged([f"${ids + 16 * half + 4 * s + k}" for s in range(4)], [f"w{4 * half + i}" for i in range(4)])
        for pair in range(2):
            to = f"p{2 * k + pair}"
            for four in range(fours):
                for block, name in enumerate("cd"):
                    for half in range(halves):
                        rows = f"w{4 * half + 2 * pair}", f"w{4 * half + 2 * pair + 1}"
                        plane = f"${planes + 4 * ((2 * four + block) * halves + half)}"
                        lines.append(_product(name, rows, plane, _four(name if half else "zero")))
                for i in (0, 2):  # c0 + 2 c1 + 4 d0 - 8 d1
                    lines += [f"mad.lo.s32 c{i}, c{i + 1}, 2, c{i};", f"mad.lo.s32 d{i}, d{i + 1}, -2, d{i};"]
                    lines.append(f"mad.lo.s32 c{i}, d{i}, 4, c{i};")
                mine = "u" if four else to  # two keys, one in each half
                lines += [f"mad.lo.s32 {mine}, c2, 0x10000, c0;", f"add.s32 {mine}, {mine}, ${starts + 4 * four};"]
                if four:
                    lines.append(f"max.f16x2 {to}, {to}, u;")  # small non-negative integers order like float16
    # the maximum over four threads; thread t keeps its four keys
    for i in range(4):
        lines += _larger(f"q{i}", f"p{i}", f"p{i + 4}", "high", 2)
    for i in range(2):
        lines += _larger(f"p{i}", f"q{i}", f"q{i + 2}", "odd", 1)
        bias, kept = 0x10001 * (above(halves) - (MIDDLE << shift)), 0x10001 * (0xFFFF >> shift)
        lines += [f"mov.b32 u, {bias:#x};", f"max.f16x2 p{i}, p{i}, u;", f"sub.u32 p{i}, p{i}, u;"]
        lines += [f"shr.u32 p{i}, p{i}, {shift};", f"and.b32 p{i}, p{i}, {kept:#x};"] if shift else []
        lines += [f"mov.b32 u, {0x10001 * MOST:#x};", f"min.f16x2 p{i}, p{i}, u;"]
        lines += [f"and.b32 ${2 * i}, p{i}, 0xffff;", f"shr.u32 ${2 * i + 1}, p{i}, 16;"]
    return _whole(lines, 4 * halves + 2 * fours * halves + fours + 1)


@functools.cache
def count() -> tuple[str, str]:
    """Return code that counts how often each number up to 127 occurs among a warp's 128, added to a tensor: element n of 128
    counts n.

    In: the numbers; the tensor. Bits 4, 5, 6 (g) and 1 (+ 8) of a number select its row, bits 0, 2 and 3 its column. The
    counts therefore come out in order.
    """
    lines = [".reg .b32 b<7>, m<3>, x<7>, y<7>, u, lane;", ".reg .pred odd, high, is<7>;", *_laid_out(12), *_parity()]
    for i in range(3):  # all ones if g lacks the bit
        lines += [f"shr.u32 u, lane, {2 + i};", "and.b32 u, u, 1;", f"sub.u32 m{i}, u, 1;"]
    # b: masks of the numbers, among the thread's 32 of 128, that have each bit.
    for i, to in enumerate("bxyx"):
        for bit in range(7):
            lines += [f"and.b32 u, ${4 + i}, {1 << bit};", f"setp.ne.u32 is{bit}, u, 0;"]
        lines += [f"vote.sync.ballot.b32 {to}{bit}, is{bit}, 0xffffffff;" for bit in range(7)]
        if i == 1:
            lines += [f"selp.b32 b{bit}, x{bit}, b{bit}, odd;" for bit in range(7)]
    for bit in range(7):
        lines += [f"selp.b32 y{bit}, x{bit}, y{bit}, odd;", f"selp.b32 b{bit}, y{bit}, b{bit}, high;"]
    for to, bits in (("x0", (4, 5, 6)), ("x1", (0, 2, 3))):
        lines.append(f"xor.b32 {to}, b{bits[0]}, m0;")
        lines += [f"lop3.b32 {to}, {to}, b{bits[i]}, m{i}, 0x60;" for i in (1, 2)]  # a & (b ^ c)
    lines += ["and.b32 x2, x0, b1;", "xor.b32 x0, x0, x2;"]
    lines.append(_product("$", ("x0", "x2"), "x1", "{$8, $9, $10, $11}"))
    return _whole(lines, 3)


def native(device: torch.device) -> bool:
    """Return whether a device has these instructions (compute capability 8.0 and above)."""
    return nvidia(device, (8, 0))


def above(halves: int) -> int:
    """Return an upper bound of half of the absolute sum of `halves` times 128 coordinates, which are at least -8."""
    return 512 * halves


def _whole(lines: Sequence[str], tensors: int) -> tuple[str, str]:
    return "{\n" + "\n".join(lines) + "\n}", ",".join(["=r"] * 4 + ["r"] * (4 * tensors))


def _four(name: str) -> str:
    return "{" + ", ".join(f"{name}{i}" for i in range(4)) + "}"


def _product(to: str, rows: tuple[str, str], column: str, first: str) -> str:
    kind = "m16n8k128.row.col.s32.b1.b1.s32.and.popc"
    return f"mma.sync.aligned.{kind} {_four(to)}, {{{rows[0]}, {rows[1]}}}, {{{column}}}, {first};"


def _laid_out(register: int) -> list[str]:
    """Set lane, and trap unless the first of a thread's four elements is 4 lane of 128."""
    lines = ["mov.u32 lane, %laneid;", "shl.b32 u, lane, 2;", f"xor.b32 u, u, ${register};", "and.b32 u, u, 127;"]
    return [".reg .pred off;", *lines, "setp.ne.u32 off, u, 0;", "@off trap;"]


def _parity() -> list[str]:
    """Set the predicates odd and high to the bits of t."""
    return ["and.b32 u, lane, 1;", "setp.ne.u32 odd, u, 0;", "and.b32 u, lane, 2;", "setp.ne.u32 high, u, 0;"]


def _exchanged(x: Sequence[str], w: Sequence[str]) -> list[str]:
    """Transpose words of four keys in one subspace each into words of four subspaces of one key each."""
    pairs = ((x[0], x[1], 0x5140), (x[0], x[1], 0x7362), (x[2], x[3], 0x5140), (x[2], x[3], 0x7362))
    lines = [f"prmt.b32 x{i}, {a}, {b}, {take:#x};" for i, (a, b, take) in enumerate(pairs)]
    last = ((0, 2, 0x5410), (0, 2, 0x7632), (1, 3, 0x5410), (1, 3, 0x7632))
    return lines + [f"prmt.b32 {to}, x{a}, x{b}, {take:#x};" for to, (a, b, take) in zip(w, last, strict=True)]


def _larger(to: str, low: str, high: str, mine: str, apart: int) -> list[str]:
    """Take the maximum of two threads' numbers, in halves of a word: the thread where `mine` holds keeps `high`, the other
    `low`."""
    lines = [f"selp.b32 u, {low}, {high}, {mine};", f"selp.b32 v, {high}, {low}, {mine};"]
    return [*lines, f"shfl.sync.bfly.b32 u, u, {apart}, 31, 0xffffffff;", f"max.f16x2 {to}, u, v;"]
