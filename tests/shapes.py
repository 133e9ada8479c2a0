"""The shapes that every kernel is tested over."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvthaw.testing import shapes
from kvthaw.testing.shapes import DTYPES, HEAD_DIMS, TOLERANCE, close

__all__ = ["DTYPES", "GROUPS", "HEAD_DIMS", "LENGTHS", "SHAPES", "TOLERANCE", "Shape", "close", "over_shapes", "poisoned"]

LENGTHS = [1, 2, 63, 64, 65]
GROUPS = [1, 4, 8]


@dataclass(frozen=True)
class Shape(shapes.Shape):
    """A shape of keys of so many tokens."""

    tokens: int = 65

    def __str__(self) -> str:
        return f"{super().__str__()}-n{self.tokens}"

    def query(self, steps: int | None = None) -> Tensor:
        """Return random queries [B, Hq, D], or [B, Hq, T, D] of so many steps."""
        size = (self.batch, self.q_heads) + (() if steps is None else (steps,)) + (self.head_dim,)
        return torch.randn(size).to(self.dtype)

    def keys(self, tokens: int | None = None) -> Tensor:
        """Return random keys [B, H, n, D]."""
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


def poisoned(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of NaN, for results that must be written whole."""
    return torch.full(size, torch.nan, dtype=dtype)
