"""Attention to recent tokens, against attention by a mask of all tokens."""

from __future__ import annotations

import pytest
import torch

from kvthaw.kernels.dense import masked_attention
from kvthaw.kernels.local import Span, local_attention
from shapes import Shape, close


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("steps", "n", "size"), [(1, 1, 4), (1, 90, 7), (5, 90, 90), (90, 90, 24), (700, 730, 50)])
@pytest.mark.parametrize("special", [False, True])
def test_each_query_attends_to_its_span(chunked: bool, steps: int, n: int, size: int, special: bool) -> None:
    shape, span = Shape(batch=1, heads=2, group=2, head_dim=16, tokens=n), Span(size, chunked)
    q, k, v = shape.query(steps), shape.keys(), shape.keys()
    how = {"scale": 0.3, "softcap": 4.0, "sinks": torch.randn(shape.q_heads)} if special else {"scale": 0.3}
    at, of = torch.arange(n - steps, n)[:, None], torch.arange(n)
    mask = (of <= at) & ((of // size == at // size) if chunked else (at - of < size))
    first = span.first(n - steps)
    out = local_attention(q, k[:, :, first:], v[:, :, first:], first, span, **how)
    close(out, masked_attention(q, k, v, mask[None, None], **how))
    assert [span.first(i) for i in range(n)] == span.firsts(torch.arange(n)).tolist()
