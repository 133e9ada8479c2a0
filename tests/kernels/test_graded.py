"""Graded votes: the similarity of each centroid in whole numbers that fit a byte over all subspaces."""

from __future__ import annotations

import pytest
import torch
from paris import SEED, check_bytes, poisoned

from kvthaw.kernels import HAS_TRITON, collide, tiers
from kvthaw.kernels import graded as op
from kvthaw.kernels.query import rotate_queries
from kvthaw.kernels.srht import make_rotation, srht
from kvthaw.kernels.tiers import Combine


def test_a_key_has_the_votes_of_its_signs() -> None:
    """In float64: what the query has in the coordinates whose signs a key shares, in 127ths of sqrt(d) |q|, less the rounding."""
    rotation = make_rotation(64, SEED)
    keys, query = torch.randn(1, 1, 500, 64), torch.randn(1, 3, 64)
    y, q = srht(keys[0, 0].double(), rotation).double(), srht(query[0].double(), rotation).double()
    ids = ((y.reshape(500, 8, 8) >= 0).long() << torch.arange(8)).sum(dim=2).to(torch.uint8).T[None, None]
    totals = torch.full((1, 1, 128), 7, dtype=torch.int32)
    _, table = op.graded(query, rotation, 1, totals, mean=False, combine="max")
    found = collide.definition(table, ids, "max")[0, 0]
    shared = ((y >= 0)[None] == (q >= 0)[:, None]) * q.abs()[:, None]
    want = (127 * shared.sum(dim=2) / (8 * q.norm(dim=1))[:, None]).amax(dim=0)
    assert ((found <= want) & (found > want - 8)).all()
    assert not totals.any()


@pytest.mark.parametrize("combine", ["max", "sum"])
def test_all_votes_together_fit(combine: Combine) -> None:
    """The key that agrees with the query in every coordinate, and a query in one subspace alone."""
    similarity = torch.randn(2, 1, 3, 32, 256)
    similarity[1, :, :, 1:] = 0
    votes = op.definition(similarity, combine)
    assert (votes >= 0).all()
    together = votes.amax(dim=4).sum(dim=3)
    most = op.most(32, combine) // (1 if combine == "max" else 3)
    assert op.most(32, combine) <= (255 if combine == "max" else 1023)
    assert (together <= most).all()
    assert (together >= most - 32).all()
    assert not op.definition(torch.zeros(1, 1, 2, 8, 256), combine).any()


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
@pytest.mark.parametrize(
    ("dim", "group", "combine", "mean"),
    [(64, 4, "max", False), (80, 3, "sum", False), (256, 2, "max", True), (8, 5, "max", False)],
)
def test_kernel(dim: int, group: int, combine: Combine, mean: bool, device: torch.device) -> None:
    rotation = make_rotation(dim, SEED, device=device)
    query = torch.randn(2, group, dim, device=device)
    query[1] = 0.0
    totals = torch.full((2, 1, op.most(rotation.padded // 8, combine) + 1), 99, dtype=torch.int32, device=device)
    with poisoned():
        rotated, table = op.launch(query, rotation, 1, totals, mean=mean, combine=combine)
    assert not totals.any()
    want = rotate_queries(query.cpu(), 1, make_rotation(dim, SEED), mean=mean)
    torch.testing.assert_close(rotated.values.cpu(), want, atol=5e-6, rtol=1e-5)
    check_bytes(rotated)
    votes = op.definition(tiers.similarities(want), combine, op.sign_span(want))
    assert int(votes.amax(dim=4).sum(dim=3).max()) <= op.most(want.shape[4], combine) // (group if combine == "sum" else 1)
    differ = table.cpu() != tiers.pack(votes, combine)
    assert not differ[1].any()
    assert differ.float().mean() < 0.02  # rounded down from almost a whole number
    if combine == "sum":
        assert (table.cpu() - tiers.pack(votes, combine)).abs().max() <= group
