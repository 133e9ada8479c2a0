"""Shapes that kernels and methods are tested over, and the one table of tolerances."""

from __future__ import annotations

from dataclasses import dataclass

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
HEAD_DIMS = [64, 80, 96, 128, 192, 256]


@dataclass(frozen=True)
class Shape:
    """batch sequences, heads KV heads, group query heads on each, head_dim, dtype."""

    batch: int = 2
    heads: int = 2
    group: int = 4
    head_dim: int = 64
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"b{self.batch}-h{self.heads}x{self.group}-d{self.head_dim}-{dtype}"

    @property
    def q_heads(self) -> int:
        """Query heads in all, Hq."""
        return self.heads * self.group


SMALL = Shape(batch=1, heads=2, group=2, head_dim=64)
BATCH = Shape(batch=3, heads=2, group=2, head_dim=64)
VARIANTS = tuple(
    dict.fromkeys(
        (
            *(Shape(batch=2, heads=2, group=4, head_dim=d) for d in HEAD_DIMS),
            *(Shape(batch=2, heads=2, group=4, dtype=t) for t in DTYPES),
            Shape(batch=2, heads=4, group=1, head_dim=128, dtype=torch.bfloat16),
            Shape(batch=2, heads=1, group=8, head_dim=80, dtype=torch.float16),
            Shape(batch=2, heads=1, group=7, head_dim=128, dtype=torch.bfloat16),
        )
    )
)
"""Head dimensions, dtypes and groups of query heads, one at a time and some together."""


def close(found: Tensor, expected: Tensor, dtype: torch.dtype | None = None, *, what: str = "") -> None:
    """Raise AssertionError unless two results are equal within the tolerance of a dtype, by default the found one's; NaN is
    never equal.

    what: their description, for the message.
    """
    near(found, expected, what=what, **TOLERANCE[dtype or found.dtype])


def near(found: Tensor, expected: Tensor, *, atol: float, rtol: float, what: str = "") -> None:
    """Raise AssertionError, which begins with `what`, unless two results are equal within a tolerance."""
    if found.shape == expected.shape and torch.allclose(found.float(), expected.float(), atol=atol, rtol=rtol):
        return  # a twentieth of what the message takes
    text = f"{what}: " if what else ""
    torch.testing.assert_close(
        found.float(), expected.float(), atol=atol, rtol=rtol, msg=lambda differs: text + " ".join(differs.split())
    )
