"""Merging attention over disjoint sets of keys by their log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint key sets. outs: [..., D], lses: [...], natural log; any float dtype.

    Returns (out [..., D], lse [...]) in float32: lse = log sum_i exp(lse_i), out = sum_i exp(lse_i - lse) out_i. A part with lse
    -inf adds nothing; where all are -inf, out is 0 and lse is -inf.
    """
    lse = torch.stack([part.float() for part in lses])
    most = lse.amax(dim=0)
    weight = torch.exp(
        lse - torch.where(most == -torch.inf, 0.0, most)
    )  # by the largest, not the total: exact for large lse too
    total = weight.sum(dim=0)
    out = torch.zeros_like(outs[0], dtype=torch.float32)
    for part, w in zip(outs, weight / total.clamp(min=1.0), strict=True):
        out = out + torch.where(w[..., None] > 0, part.float(), 0.0) * w[..., None]
    return out, most + torch.log(total)
