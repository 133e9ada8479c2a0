"""Multiply an activation of one tensor with another, in one launch: the gate of a model's feed-forward layers.

Two launches of torch move 10 bytes an element in bfloat16; the kernel moves 6. For 16,384 tokens of 14,336 that is 1.4 GB and
0.33 ms at 4.3 TB/s, for 0.55. A mask by single elements would make every load one of 2 bytes. Both tensors may be halves of one
product's rows.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.chain import dependent
from kvthaw.kernels.gpu import by_device

Activation = Literal["silu", "gelu_tanh"]

_ELEMENTS = 2048  # of a program
_UNIT = 16  # elements; the count of most models' layers is a multiple


def definition(gate: Tensor, up: Tensor, activation: Activation, *, overwrite: bool = False) -> Tensor:
    """Return activation(gate) * up, with the activation rounded to the dtype of gate.

    overwrite: the result may take the place of gate. For 16,384 tokens of 14,336 that is 448 MiB less.
    """
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


if HAS_TRITON:
    import triton
    import triton.language as tl

    from kvthaw.kernels.chain import follow

    @triton.jit
    def multiplied(x, by, kind: tl.constexpr, SILU: tl.constexpr):
        # The activation of x, rounded to `kind`, times `by`; all float32.
        z = x if SILU else 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 0.5 (1 + tanh z) is the sigmoid of 2 z
        active = x / (1.0 + tl.exp(-tl.maximum(z, -80.0)))
        return active.to(kind).to(tl.float32) * by

    @triton.jit(do_not_specialize=["units", "blocks"])
    def _gated(out, gate, up, units, blocks, stride, out_stride, UNIT: tl.constexpr, ELEMENTS: tl.constexpr, SILU: tl.constexpr,
               PDL: tl.constexpr):  # fmt: skip
        # Program: a block of a row. The mask is the same for all elements of a unit, so a thread loads 16 bytes at once.
        follow(PDL)
        row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
        at = block.to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
        inside = at < units.to(tl.int64) * UNIT
        begin = row.to(tl.int64) * stride
        x = tl.load(gate + begin + at, mask=inside, other=0.0).to(tl.float32)
        by = tl.load(up + begin + at, mask=inside, other=0.0).to(tl.float32)
        kind: tl.constexpr = gate.dtype.element_ty
        found = multiplied(x, by, kind, SILU).to(out.dtype.element_ty)
        tl.store(out + row.to(tl.int64) * out_stride + at, found, mask=inside)


def serves(gate: Tensor, up: Tensor) -> bool:
    """Return whether the kernel can take such tensors: of one shape, dtype and strides, with rows that lie at equal distances."""
    same = gate.shape == up.shape and gate.dtype == up.dtype and gate.stride() == up.stride()
    return same and (gate.is_contiguous() or (gate.stride(-1) == 1 and _row_stride(gate) is not None))


def _row_stride(x: Tensor) -> int | None:
    """Return the distance of the rows of x, of at least two dimensions; None if it differs."""
    row, each = x.stride(-2), x.stride(-2)
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size > 1 and stride != each:
            return None
        each *= size
    return row


def launch(gate: Tensor, up: Tensor, activation: Activation, *, overwrite: bool = False) -> Tensor:
    """Launch the Triton kernel; arguments and result as in `definition`, where `serves` agrees."""
    assert serves(gate, up)
    out = gate if overwrite else torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    flat = gate.is_contiguous()
    width, stride = (gate.numel(), 0) if flat else (gate.shape[-1], gate.stride(-2))
    if gate.numel():
        unit, blocks = 1 if width % _UNIT else _UNIT, triton.cdiv(width, _ELEMENTS)
        _gated[(blocks * (gate.numel() // width),)](
            out, gate, up, width // unit, blocks, stride, stride if overwrite else width, UNIT=unit,
            ELEMENTS=_ELEMENTS, SILU=activation == "silu", **dependent(gate.device),
        )  # fmt: skip
    return out


gated = by_device(launch, definition)
