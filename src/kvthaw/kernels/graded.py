"""What a collision with each centroid is worth to a query, graded: as much as the centroid is similar to it.

A key's votes then add up to an estimate of q.k by its centroids alone, in whole numbers: in each subspace a centroid gives
floor(most (<q_b, c> - least_b) / span), where span = sum_b (greatest_b - least_b), so that the votes of all subspaces are at most
`most` and fit the byte in which `collide` adds them. For centroids that are learned; sign patterns need no votes of their own
(signs.py).

Beside tiers (appendix B.2.1), which see the order of the keys within a
subspace only, the subspaces in which the query is long count for more, and nothing needs to be ranked or counted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvthaw.kernels.tiers import Combine


def most(subs: int, combine: Combine) -> int:
    """The most votes of a key over `subs` subspaces: of each head ("max"), or of a group's heads together ("sum")."""
    return (127 if subs <= 16 else 255) if combine == "max" else 1023


def definition(similarity: Tensor, combine: Combine) -> Tensor:
    """Votes [L, H, P, B, 256] int32 of similarities <q_b, c>, likewise. A query of zeros gives none."""
    least, greatest = similarity.amin(dim=-1, keepdim=True), similarity.amax(dim=-1, keepdim=True)
    span = (greatest - least).sum(dim=3, keepdim=True)
    of_head = most(similarity.shape[3], combine) // (similarity.shape[2] if combine == "sum" else 1)
    return torch.where(span > 0, (similarity - least) * (of_head / span), 0.0).floor().int()
