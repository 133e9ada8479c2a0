"""Attention to recent tokens, against attention by a mask of all tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


@pytest.mark.parametrize("special", [False, True])
def test_attention_by_a_mask_of_many_queries_holds_few_scores_at_once(special: bool) -> None:
    """Sliding-window layers of a prompt, in one chunk, have such a mask: of 16,384 tokens and 64 heads all scores are 64 GiB."""
    shape, steps = Shape(batch=2, heads=1, group=2, head_dim=8, tokens=2000), 1900
    q, k, v = shape.query(steps), shape.keys(), shape.keys()
    at, of = torch.arange(2000 - steps, 2000)[:, None], torch.arange(2000)
    mask = ((of <= at) & (at - of < 70)).repeat(2, 1, 1, 1)
    mask[0, :, :, :900] = False  # padding, of queries too
    how = {"scale": 0.3, "softcap": 4.0, "sinks": torch.randn(shape.q_heads)} if special else {"scale": 0.3}
    with Largest() as largest:
        out = masked_attention(q, k, v, mask, **how)
    assert largest.numbers <= q.numel() * 20
    parts = [masked_attention(q[:, :, i : i + 100], k, v, mask[:, :, i : i + 100], **how) for i in range(0, steps, 100)]
    close(out, torch.cat(parts, dim=2))


class Largest(TorchDispatchMode):
    """Counts the numbers of the largest floating-point tensor that is made."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.numbers = max(self.numbers, tensor.numel())
        return out
