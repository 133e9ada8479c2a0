"""Graded votes: the similarity of each centroid in whole numbers that fit a byte over all subspaces."""

from __future__ import annotations

import pytest
import torch

from kvthaw.kernels import graded as op
from kvthaw.kernels.tiers import Combine


@pytest.mark.parametrize("combine", ["max", "sum"])
def test_all_votes_together_fit(combine: Combine) -> None:
    """The key that agrees with the query in every coordinate, and a query in one subspace alone."""
    similarity = torch.randn(2, 1, 3, 32, 256)
    similarity[1, :, :, 1:] = 0
    votes = op.definition(similarity, combine)
    assert (votes >= 0).all()
    total = votes.amax(dim=4).sum(dim=3)
    most = op.most(32, combine) // (1 if combine == "max" else 3)
    assert op.most(32, combine) <= (255 if combine == "max" else 1023)
    assert (total <= most).all()
    assert (total >= most - 32).all()
    assert not op.definition(torch.zeros(1, 1, 2, 8, 256), combine).any()
