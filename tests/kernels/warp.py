"""What the instructions of kernels/bits.py and nibbles.py do, on a warp of 32 threads, without a GPU: only what they use."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

THREAD = torch.arange(32)
WORD = 0xFFFFFFFF


def run(code: str, given: Sequence[Tensor], outputs: int = 4) -> list[Tensor]:
    """Run instructions of one warp, and return its first registers, signed. Raise AssertionError where the kernel would be stopped.

    given: the registers behind these, [32] int32 or int64 each.
    outputs: the number of registers to return.
    """
    held = {f"${outputs + i}": x.long() & WORD for i, x in enumerate(given)}
    truths: dict[str, Tensor] = {}

    def value(name: str) -> Tensor:
        if name == "%laneid":
            return THREAD
        if name.startswith("0f"):
            return torch.full((32,), int(name[2:], 16))
        return held[name] if name in held else torch.full((32,), int(name, 0) & WORD)

    for line in filter(None, (part.strip() for part in code.strip("{}\n").split(";"))):
        if line.startswith(".reg"):
            continue
        if line.startswith("@"):
            condition, what = line[1:].split()
            assert what == "trap", line
            assert not truths[condition].any(), "the kernel was stopped"
            continue
        operation, rest = line.split(None, 1)
        if operation == "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32":
            sums, rows, column, first = (re.split(r",\s*", group) for group in re.findall(r"\{([^}]*)\}", rest))
            added = _numbers([*map(value, rows)], [*map(value, column)], [*map(value, first)])
            held |= dict(zip(sums, added, strict=True))
            continue
        if operation.startswith("mma"):
            assert operation == "mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc"
            sums, rows, column, first = (re.split(r",\s*", group) for group in re.findall(r"\{([^}]*)\}", rest))
            found = _product(value(rows[0]), value(rows[1]), value(column[0]))
            held |= {name: (found[i] + value(start)) & WORD for i, (name, start) in enumerate(zip(sums, first, strict=True))}
            continue
        to, *names = re.split(r",\s*", rest)
        if operation == "setp.ne.u32":
            truths[to] = value(names[0]) != value(names[1])
        elif operation == "selp.b32":
            held[to] = torch.where(truths[names[2]], value(names[0]), value(names[1]))
        elif operation == "vote.sync.ballot.b32":
            held[to] = torch.full((32,), int((truths[names[0]].long() << THREAD).sum()))
        elif operation == "shfl.sync.bfly.b32":
            held[to] = value(names[0])[THREAD ^ int(names[1])]
        else:
            held[to] = PLAIN[operation](*map(value, names)) & WORD
    return [_signed(held[f"${i}"]) for i in range(outputs)]


def _signed(x: Tensor) -> Tensor:
    return ((x & WORD) ^ (1 << 31)) - (1 << 31)


def _product(upper: Tensor, lower: Tensor, column: Tensor) -> list[Tensor]:
    """What m16n8k128 gives each thread of its four sums: rows and column as the threads have them."""
    bit = torch.arange(32)
    a = torch.stack([((x[:, None] >> bit) & 1).reshape(8, 128) for x in (upper, lower)])
    sums = a @ ((column[:, None] >> bit) & 1).reshape(8, 128).T  # [2, 8, 8]
    return [sums[i // 2][THREAD // 4, 2 * (THREAD % 4) + i % 2] for i in range(4)]


def _numbers(rows: Sequence[Tensor], column: Sequence[Tensor], first: Sequence[Tensor]) -> list[Tensor]:
    """What m16n8k16 gives each thread of its four sums, of pairs of bfloat16: the bits of float32."""
    g, t = THREAD // 4, THREAD % 4
    a, b = torch.zeros(16, 16), torch.zeros(16, 8)
    for i, x in enumerate(rows):
        for half in range(2):
            a[g + 8 * (i % 2), 2 * t + 8 * (i // 2) + half] = _float(x >> (16 * half) << 16)
    for i, x in enumerate(column):
        for half in range(2):
            b[2 * t + 8 * i + half, g] = _float(x >> (16 * half) << 16)
    sums = a @ b
    found = [_float(x) + sums[g + 8 * (i // 2), 2 * t + i % 2] for i, x in enumerate(first)]
    return [x.view(torch.int32).long() & WORD for x in found]


def _float(x: Tensor) -> Tensor:
    return _signed(x & WORD).int().view(torch.float32)


def _bytes(a: Tensor, b: Tensor, take: Tensor) -> Tensor:
    both = torch.stack([(x >> (8 * i)) & 255 for x in (a, b) for i in range(4)])
    return sum((both[(int(take[0]) >> (4 * i)) & 7] << (8 * i) for i in range(4)), torch.zeros_like(a))


def _halves(a: Tensor, b: Tensor, larger: bool) -> Tensor:
    parts = [((a >> i) & 0xFFFF, (b >> i) & 0xFFFF) for i in (0, 16)]
    assert all(int(x.max()) < 0x7C00 for part in parts for x in part), "no finite half that is not negative"
    low, high = (torch.maximum(x, y) if larger else torch.minimum(x, y) for x, y in parts)
    return low | (high << 16)


PLAIN: dict[str, Callable[..., Tensor]] = {
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "mov.f32": lambda a: a,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "shr.s32": lambda a, b: _signed(a) >> b,
    "sub.u32": lambda a, b: a - b,
    "sub.s32": lambda a, b: a - b,
    "add.s32": lambda a, b: a + b,
    "mul.lo.s32": lambda a, b: _signed(a) * _signed(b),
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "mad.lo.s32": lambda a, b, c: _signed(a) * _signed(b) + c,
    "prmt.b32": _bytes,
    "max.f16x2": lambda a, b: _halves(a, b, True),
    "min.f16x2": lambda a, b: _halves(a, b, False),
    "lop3.b32": lambda a, b, c, table: {0x60: a & (b ^ c), 0xEA: (a & b) | c}[int(table[0])],
}
