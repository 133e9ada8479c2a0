"""The estimate of what is not selected, by kernel and definition, against a sum over tokens in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.remainder import definition, launch
from kvthaw.kernels.row_format import E4M3, RowFormat
from shapes import Shape, close, over_shapes

FIRST = 5


def by_tokens(query: Tensor, means: Tensor, rows: Tensor, known: Tensor, *, page: int, scale: float) -> tuple[Tensor, Tensor]:
    """Each token that is not selected has its page's mean key and mean value: written token by token, in float64."""
    batch, q_heads, dim = query.shape
    heads = means.shape[1]
    out, lse = torch.zeros(batch, q_heads, dim, dtype=torch.float64), torch.full((batch, q_heads), -torch.inf).double()
    for b in range(batch):
        for h in range(q_heads):
            kv = h // (q_heads // heads)
            taken = set(rows[b, kv].tolist())
            left = [t for t in range(int(known[b])) if t + FIRST not in taken]
            if left:
                pages = means[b, kv, [t // page for t in left]].double()
                logits = pages[:, 0] @ query[b, h].double() * scale
                lse[b, h] = logits.logsumexp(0)
                out[b, h] = logits.softmax(0) @ pages[:, 1]
    return out, lse


def case(shape: Shape, page: int, room: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    pages = -(-shape.tokens // page)
    means = torch.randn(shape.batch, shape.heads, pages + room, 2, shape.head_dim).to(shape.dtype)
    known = torch.tensor([max(0, shape.tokens - 7 * b) for b in range(shape.batch)], dtype=torch.int32)
    for b in range(shape.batch):
        means[b, :, -(-int(known[b]) // page) :] = torch.nan  # what holds no token is never read
    rows = torch.full((shape.batch, shape.heads, 24), -1, dtype=torch.int32)
    for b in range(shape.batch):
        for h in range(shape.heads):
            chosen = torch.randperm(int(known[b]))[: 20 - 3 * h]
            rows[b, h, : len(chosen)] = chosen.int() + FIRST
    return shape.query(), means, rows, known


@over_shapes
@pytest.mark.parametrize("page", [1, 8, 24])
def test_definition_is_the_sum_over_tokens(shape: Shape, page: int) -> None:
    query, means, rows, known = case(shape, page)
    format = RowFormat(shape.head_dim, shape.dtype)
    found = definition(query, means, rows, known, format, first=FIRST, page=page, scale=0.3)
    out, lse = by_tokens(query, means, rows, known, page=page, scale=0.3)
    torch.testing.assert_close(found.lse.double(), lse, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.out.double(), out, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@over_shapes
@pytest.mark.parametrize("page", [1, 24])
@pytest.mark.parametrize("kind", [RowFormat, E4M3])
def test_kernel_is_the_definition(shape: Shape, page: int, kind: type[RowFormat], device: torch.device) -> None:
    query, means, rows, known = (tensor.to(device) for tensor in case(shape, page, room=70))
    format = kind(shape.head_dim, shape.dtype)
    means = format.encode(means)
    expected = definition(query, means, rows, known, format, first=FIRST, page=page, scale=0.3)
    found = launch(query, means, rows, known, format, first=FIRST, page=page, scale=0.3)
    close(found.out, expected.out, shape.dtype)
    close(found.lse, expected.lse, torch.float32)


@pytest.mark.parametrize("estimate", [definition, *([launch] if HAS_TRITON else [])])
def test_nothing_is_left_where_all_is_selected(estimate, device: torch.device) -> None:  # type: ignore[no-untyped-def]
    query, means = torch.randn(2, 4, 16, device=device), torch.randn(2, 2, 3, 2, 16, device=device)
    known = torch.tensor([20, 0], dtype=torch.int32, device=device)
    rows = torch.arange(24, dtype=torch.int32, device=device).where(torch.arange(24, device=device) < 20, -1).expand(2, 2, 24)
    format = RowFormat(16, torch.float32)
    found = estimate(query, means, rows.contiguous(), known, format, first=0, page=8, scale=1.0)
    assert found.lse.eq(-torch.inf).all()
    assert found.out.eq(0).all()
