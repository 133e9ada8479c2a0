"""Partials of disjoint keys merge to the whole."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvthaw.kernels import merge as op
from kvthaw.kernels.dense import definition
from kvthaw.kernels.merge import merge
from shapes import DTYPES, SHAPES, Shape, close, poisoned


@given(cuts=st.lists(st.integers(0, 40), max_size=4), seed=st.integers(0, 1000))
def test_parts_merge_to_the_whole(cuts: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    shape = Shape(tokens=40, head_dim=16)
    q, k, v = 3 * shape.query(2), shape.keys(), shape.keys()
    expected, expected_lse = definition(q, k, v, scale=0.5, causal=False)
    order = torch.randperm(40)
    k, v = k[:, :, order], v[:, :, order]
    bounds = [0, *sorted(cuts), 40]
    parts = [definition(q, k[:, :, a:b], v[:, :, a:b], scale=0.5, causal=False) for a, b in pairwise(bounds)]
    out, lse = merge([p[0] for p in parts], [p[1] for p in parts])
    close(out, expected)
    close(lse, expected_lse)


def test_parts_that_saw_nothing_add_nothing() -> None:
    out, lse = torch.randn(2, 3, 8), torch.randn(2, 3)
    none = torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf)
    merged, total = merge((none[0], out, none[0]), (none[1], lse, none[1]))
    close(merged, out)
    close(total, lse)
    merged, total = merge((none[0], none[0]), (none[1], none[1]))
    assert (merged == 0).all()
    assert (total == -torch.inf).all()


def test_far_apart() -> None:
    """Sums of exponentials that float32 does not hold."""
    outs = torch.ones(1, 4), 3 * torch.ones(1, 4)
    out, lse = merge(outs, (torch.tensor([5000.0]), torch.tensor([5000.0])))
    close(out, 2 * torch.ones(1, 4))
    close(lse, torch.tensor([5000 + 0.6931]))
    out, _ = merge(outs, (torch.tensor([-5000.0]), torch.tensor([5000.0])))
    close(out, outs[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_result_is_float32(dtype: torch.dtype) -> None:
    out, lse = merge((torch.randn(2, 8).to(dtype),) * 2, (torch.zeros(2).to(dtype),) * 2)
    assert out.dtype == lse.dtype == torch.float32


@pytest.mark.parametrize(("shape", "count"), [(shape, 1 + turn % op.PARTS) for turn, shape in enumerate(dict.fromkeys(SHAPES))])
def test_kernel_merges_parts(shape: Shape, count: int, device: torch.device) -> None:
    """The first a merged one, the others as flash attention gives them, heads inside tokens or not; some queries saw nothing."""
    pytest.importorskip("triton")
    shape = replace(shape, tokens=min(shape.tokens, 7))  # a query is a program
    size = (shape.batch, shape.q_heads, shape.tokens)
    parts = [(torch.randn(*size, shape.head_dim).to(device), 5 * torch.randn(size).to(device))]
    for i in range(1, count):
        part = torch.randn(shape.batch, shape.tokens, shape.q_heads, shape.head_dim).to(device, shape.dtype).transpose(1, 2)
        parts.append((part if i % 2 else part.contiguous(), 5 * torch.randn(size).to(device)))
    for i, (out, lse) in enumerate(parts):
        lse[:, i % shape.q_heads, :: 3 - i % 2] = -torch.inf
        lse[:, -1:, ::2] = -torch.inf
        out[lse == -torch.inf] = poisoned(1, dtype=out.dtype).to(device)
    for dtype in (shape.dtype, torch.float32):
        expected, total = op.definition(parts, dtype)
        out, lse = op.launch(parts, dtype)
        assert out.dtype == dtype
        assert out.transpose(1, 2).is_contiguous()
        close(out, expected)
        close(lse, total)
