"""Graded votes: a collision with a centroid is worth as much as the centroid is similar to the query.

The votes of a key then add up to an integer estimate of q.k from its centroids alone. In each subspace a centroid gives
floor(most (<q_b, c> - min_b) / span), where span = sum_b (max_b - min_b). The votes of all subspaces then sum to at most
`most` and fit the byte in which `collide` accumulates them. Used with learned centroids; sign patterns need no vote tables
(signs.py).

Tiers (appendix B.2.1) rank keys within a subspace only. Graded votes weigh subspaces by the query's length in them, and
need no ranking and no cluster sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvthaw.kernels.tiers import Combine


def most(subs: int, combine: Combine) -> int:
    """Return the maximum votes of a key over `subs` subspaces: per head ("max"), or over all heads of a group ("sum")."""
    return (127 if subs <= 16 else 255) if combine == "max" else 1023


def definition(similarity: Tensor, combine: Combine) -> Tensor:
    """Compute votes [L, H, P, B, 256] int32 from similarities <q_b, c> of the same shape. A zero query gives no votes."""
    least, greatest = similarity.amin(dim=-1, keepdim=True), similarity.amax(dim=-1, keepdim=True)
    span = (greatest - least).sum(dim=3, keepdim=True)
    of_head = most(similarity.shape[3], combine) // (similarity.shape[2] if combine == "sum" else 1)
    return torch.where(span > 0, (similarity - least) * (of_head / span), 0.0).floor().int()
