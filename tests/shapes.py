"""The shapes that every kernel is tested over, and the one table of tolerances."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

TOLERANCE: dict[torch.dtype, dict[str, float]] = {
    torch.float64: {"atol": 1e-10, "rtol": 1e-10},
    torch.float32: {"atol": 2e-5, "rtol": 2e-5},
    torch.float16: {"atol": 4e-3, "rtol": 4e-3},
    torch.bfloat16: {"atol": 3e-2, "rtol": 3e-2},
}
"""Of a result in this dtype against the definition in float32, for values of about 1."""

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [1, 2, 63, 64, 65]
GROUPS = [1, 4, 8]
HEAD_DIMS = [64, 80, 96, 128, 192, 256]


@dataclass(frozen=True)
class Shape:
    """batch sequences, heads KV heads, group query heads on each, head_dim, tokens, dtype."""

    batch: int = 2
    heads: int = 2
    group: int = 4
    head_dim: int = 64
    tokens: int = 65
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        sizes = f"b{self.batch}-h{self.heads}x{self.group}-d{self.head_dim}-n{self.tokens}"
        return f"{sizes}-{str(self.dtype).removeprefix('torch.')}"

    @property
    def q_heads(self) -> int:
        return self.heads * self.group

    def query(self, steps: int | None = None) -> Tensor:
        """[B, Hq, D], or [B, Hq, T, D] of so many steps."""
        size = (self.batch, self.q_heads) + (() if steps is None else (steps,)) + (self.head_dim,)
        return torch.randn(size).to(self.dtype)

    def keys(self, tokens: int | None = None) -> Tensor:
        """[B, H, n, D]."""
        return torch.randn(self.batch, self.heads, self.tokens if tokens is None else tokens, self.head_dim).to(self.dtype)


SHAPES = [
    *(Shape(tokens=n) for n in LENGTHS),
    *(Shape(group=g) for g in GROUPS),
    *(Shape(head_dim=d) for d in HEAD_DIMS),
    *(Shape(dtype=t) for t in DTYPES),
    Shape(batch=1, heads=1, group=1, tokens=1),
    Shape(heads=1, group=8, head_dim=128, tokens=63, dtype=torch.bfloat16),
    Shape(heads=3, group=1, head_dim=96, tokens=130, dtype=torch.float16),
    Shape(heads=2, group=8, head_dim=256, tokens=64, dtype=torch.bfloat16),
    Shape(heads=2, group=4, head_dim=80, tokens=65, dtype=torch.float16),
]
over_shapes = pytest.mark.parametrize("shape", list(dict.fromkeys(SHAPES)), ids=str)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """Equal within the tolerance of a dtype, by default the found one's; NaN is never equal."""
    allowed = TOLERANCE[dtype or found.dtype]
    torch.testing.assert_close(found.float(), expected.float(), atol=allowed["atol"], rtol=allowed["rtol"])


def poisoned(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of NaN, for results that must be written whole."""
    return torch.full(size, torch.nan, dtype=dtype)
