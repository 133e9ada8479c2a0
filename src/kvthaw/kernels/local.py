"""Dense attention to recent tokens alone: a sliding window, or chunks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvthaw.kernels.dense import QUERIES, causal_attention, masked_attention


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens that a query attends to: itself and the tokens before it, `size` in all, or its own chunk of `size` tokens."""

    size: int
    chunked: bool = False

    def first(self, position: int) -> int:
        """Return the first position that a query at a position attends to."""
        return position // self.size * self.size if self.chunked else max(0, position - self.size + 1)

    def firsts(self, positions: Tensor) -> Tensor:
        """Return `first` of every position."""
        if self.chunked:
            return torch.div(positions, self.size, rounding_mode="floor") * self.size
        return (positions - self.size + 1).clamp_(min=0)


def local_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    start: int,
    span: Span,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with the last T of n tokens, each to the tokens of its span.

    query: [B, Hq, T, D].
    keys, values: [B, H, n, D], from position `start` on.

    Returns [B, Hq, T, D] in the dtype of query.

    Queries go in blocks. Each block reads only the keys that it needs, so memory does not grow with n^2.
    """
    steps, n, device = query.shape[2], keys.shape[2], query.device
    end, begin = start + n, start + n - steps
    if span.first(end - 1) <= start:
        return causal_attention(query, keys, values, scale=scale, softcap=softcap, sinks=sinks)
    outs = []
    for a in range(begin, end, QUERIES):
        b = min(a + QUERIES, end)
        first = max(start, span.first(a))
        at = torch.arange(a, b, device=device)[:, None]
        of = torch.arange(first, b, device=device)
        mask = (of <= at) & (of >= span.firsts(at))
        k, v = (x[:, :, first - start : b - start] for x in (keys, values))
        outs.append(
            masked_attention(
                query[:, :, a - begin : b - begin], k, v, mask[None, None], scale=scale, softcap=softcap, sinks=sinks
            )
        )
    return torch.cat(outs, dim=2)
