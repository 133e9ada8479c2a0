"""Weights of linear layers as kernels read them: tensors, 8-bit floating-point numbers with scales, 4-bit numbers in groups.

A step of one token reads each weight once. An 8B model has 16 GB of weights in bfloat16, 8 GB in 8 bits, and 4.3 GB in 4 bits.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvthaw.kernels.gpu import nvidia

TILE = 128
"""Columns of a tile of 4-bit numbers; it has 8 rows, and 4 words of each of 32 threads."""
MIDDLE = 8
"""The 4-bit number of a group's zero."""


@dataclass(frozen=True, slots=True)
class Float8Weight:
    """Weights w = code * scale in 8 bits, as torchao's Float8Tensor has them.

    codes: [N, K] float8_e4m3fn, contiguous.
    scale: float32, [N] or [1] for all rows, contiguous.
    """

    codes: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        if self.codes.ndim != 2 or self.codes.dtype != torch.float8_e4m3fn or self.codes.shape[1] % 4:
            raise ValueError(
                f"codes are {self.codes.dtype} {list(self.codes.shape)}; allowed: torch.float8_e4m3fn [N, K], K a multiple of 4"
            )
        rows = len(self.codes)
        if self.scale.shape not in ((rows,), (1,)) or self.scale.dtype != torch.float32:
            raise ValueError(f"scale is {self.scale.dtype} {list(self.scale.shape)}; allowed: torch.float32 [{rows}] or [1]")

    @property
    def shape(self) -> torch.Size:
        """Rows and columns."""
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes that a kernel reads."""
        return self.codes.nbytes + self.scale.nbytes

    @property
    def kind(self) -> Hashable:
        """What the weights of one launch have in common."""
        return "float8", len(self.scale) == len(self.codes)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [N, K], multiplied in float32 (float64 for float64) and rounded to a dtype."""
        wide = torch.promote_types(dtype, torch.float32)
        return (self.codes.to(wide) * self.scale[:, None].to(wide)).to(dtype)


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """Weights w = (q - 8) * scale + zero in 4 bits, as torchao's Int4TilePackedTo4dTensor has them for _weight_int4pack_mm.

    codes: [N / 8, P / 128, 32, 4] int32, contiguous, both quotients rounded up. Each tile of 8 rows and 128 columns has 4 words of
    each of 32 threads. Thread 4 g + t has numbers of row g. Bits 4 p to 4 p + 3 of word j are column 32 j + 8 p + 2 t. The 16 bits
    above are the column behind.
    scales: [P / group, N, 2] bfloat16, contiguous, N rounded up to a multiple of 8: scale and zero.
    group: columns that share a scale: 32, 64, 128 or 256.
    shape: rows N and columns K. Columns from K to P are never used.
    """

    codes: Tensor
    scales: Tensor
    group: int
    shape: torch.Size

    def __post_init__(self) -> None:
        (rows, columns), group = self.shape, self.group
        if group not in (32, 64, 128, 256):
            raise ValueError(f"group is {group}; allowed: 32, 64, 128, 256")
        high = -(-rows // 8)
        wide = self.codes.shape[1] * TILE if self.codes.ndim == 4 else 0
        if self.codes.shape != (high, wide // TILE, 32, 4) or self.codes.dtype != torch.int32 or wide < columns or columns % 2:
            raise ValueError(
                f"codes are {self.codes.dtype} {list(self.codes.shape)} for {rows} rows and {columns} columns; allowed: "
                f"torch.int32 [{high}, {-(-columns // TILE)} or more, 32, 4] and an even number of columns"
            )
        if self.scales.shape != (wide // group, 8 * high, 2) or self.scales.dtype != torch.bfloat16 or wide % group:
            raise ValueError(
                f"scales are {self.scales.dtype} {list(self.scales.shape)}; allowed: torch.bfloat16 "
                f"[{wide} / {group}, {8 * high}, 2]"
            )

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes that a kernel reads."""
        return self.codes.nbytes + self.scales.nbytes

    @property
    def kind(self) -> Hashable:
        """What the weights of one launch have in common."""
        return "int4", self.group, self.codes.shape[1]

    def numbers(self) -> Tensor:
        """Return the numbers q, [8 N, P] int32 with the rows and columns that fill up tiles."""
        high, wide = self.codes.shape[:2]
        codes = self.codes.view(high, wide, 8, 4, 4, 1, 1)  # row, thread of it, word
        shift = 4 * torch.arange(4, device=codes.device)[:, None] + 16 * torch.arange(2, device=codes.device)
        q = (codes >> shift) & 15  # and p, and the column or the one behind it
        return q.permute(0, 2, 1, 4, 5, 3, 6).reshape(8 * high, wide * TILE).int()

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [N, K], multiplied in float32 (float64 for float64) and rounded to a dtype."""
        wide = torch.promote_types(dtype, torch.float32)
        scale, zero = self.scales.to(wide).permute(1, 0, 2).repeat_interleave(self.group, dim=1).unbind(2)
        rows, columns = self.shape
        return ((self.numbers() - MIDDLE) * scale + zero)[:rows, :columns].to(dtype)


Weight = Tensor | Float8Weight | Int4Weight


def kind_of(weight: Weight) -> Hashable:
    """Return what the weights of one launch have in common."""
    return "plain" if isinstance(weight, Tensor) else weight.kind


def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Return a weight as a tensor [N, K]; a tensor stays as it is."""
    return weight if isinstance(weight, Tensor) else weight.dense(dtype)


def readable(weight: Weight, dtype: torch.dtype) -> bool:
    """Return whether a kernel reads a weight for a token of a dtype, on the weight's device."""
    if isinstance(weight, Tensor):
        return weight.is_contiguous() and weight.dtype == dtype
    gpu, device = weight.device.type == "cuda", weight.device
    if isinstance(weight, Float8Weight):
        return weight.codes.is_contiguous() and weight.scale.is_contiguous() and (not gpu or nvidia(device, (8, 9)))
    whole = weight.codes.is_contiguous() and weight.scales.is_contiguous() and weight.codes.data_ptr() % 16 == 0
    return whole and dtype == torch.bfloat16 and (not gpu or nvidia(device, (8, 0)))
