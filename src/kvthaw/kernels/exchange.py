"""Add up a small tensor of several GPUs of one host in one launch: each GPU writes its part into the memory of the others.

A decode step of two GPUs adds up 4,096 numbers twice a layer. Reading the other GPU's memory takes a barrier before and one after
it, three ways over NVLink. Here a part takes one way. No flag follows it: a number that has not arrived reads as minus zero, and
a program repeats the load until none does. Writers replace minus zero by zero.

A program uses three buffers in turn. During call n it empties the buffer of call n - 1. Another GPU writes to that buffer in call
n + 2. By then it has received what this GPU sends in call n + 1, after it emptied the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.chain import dependent

BLOCK = 1024
"""Numbers of a program."""
BUFFERS = 3


@dataclass(frozen=True, slots=True)
class Inbox:
    """Memory of this GPU for the parts of all GPUs. All of them create one of equal size.

    data: [BUFFERS, GPUs, most], filled with minus zero. `most` is the largest number of elements to be added up, a multiple of
        BLOCK.
    addresses: the address of each GPU's data, [GPUs], int64, on this GPU.
    calls: how often each program has run, [most / BLOCK], int32, zero at first.
    rank: the number of this GPU.
    """

    data: Tensor
    addresses: Tensor
    calls: Tensor
    rank: int

    def fits(self, x: Tensor) -> bool:
        """Return whether `add_up` takes a tensor."""
        alike = x.dtype == self.data.dtype and x.device == self.data.device
        return alike and x.is_contiguous() and x.numel() <= self.data.shape[2]


def definition(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of the GPUs' parts, added in float32 in the order of the GPUs."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.chain import follow

    @triton.jit(do_not_specialize=["n"])
    def _add_up(out, x, data, addresses, calls, n, most, RANK: tl.constexpr, GPUS: tl.constexpr, BLOCK: tl.constexpr,
                BUFFERS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
        # Program: a block of numbers.
        SIZE: tl.constexpr = data.dtype.element_ty.primitive_bitwidth
        word: tl.constexpr = tl.int16 if SIZE == 16 else tl.int32
        EMPTY: tl.constexpr = -(2 ** (SIZE - 1))  # minus zero
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        follow(PDL)
        call = tl.load(calls + tl.program_id(0))
        own = tl.load(x + at, mask=at < n, other=0.0).to(word, bitcast=True)
        own = tl.where(own == EMPTY, 0, own)
        now, before = (call % BUFFERS) * GPUS, ((call + BUFFERS - 1) % BUFFERS) * GPUS
        for gpu in tl.static_range(GPUS):
            if gpu != RANK:
                peer = tl.load(addresses + gpu).to(tl.pointer_type(word))
                tl.store(peer + (now + RANK) * most + at, own, mask=at < n)
        mine = data.to(tl.pointer_type(word))
        total = tl.zeros((BLOCK,), tl.float32)
        for gpu in tl.static_range(GPUS):
            part = own
            if gpu != RANK:
                arrived = mine + (now + gpu) * most + at
                part = tl.load(arrived, mask=at < n, other=0, volatile=True)
                while tl.max((part == EMPTY).to(tl.int32)) > 0:
                    part = tl.load(arrived, mask=at < n, other=0, volatile=True)
                tl.store(mine + (before + gpu) * most + at, tl.full((BLOCK,), EMPTY, word))
            total += part.to(data.dtype.element_ty, bitcast=True).to(tl.float32)
        tl.store(out + at, total.to(data.dtype.element_ty), mask=at < n)
        tl.store(calls + tl.program_id(0), call + 1)


def add_up(x: Tensor, inbox: Inbox) -> Tensor:
    """Return the sum of the tensors x of all GPUs, contiguous, which all pass at the same time and of the same size.

    The result is equal on all GPUs.
    """
    out, (_, gpus, most) = torch.empty_like(x), inbox.data.shape
    assert inbox.fits(x) and most % BLOCK == 0
    _add_up[(triton.cdiv(x.numel(), BLOCK),)](
        out, x, inbox.data, inbox.addresses, inbox.calls, x.numel(), most, RANK=inbox.rank, GPUS=gpus, BLOCK=BLOCK,
        BUFFERS=BUFFERS, **dependent(x.device),
    )  # fmt: skip
    return out
