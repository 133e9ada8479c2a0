"""Votes of centroids and of keys."""

from __future__ import annotations

import pytest
import torch
from paris import SEED, SHAPES, Case, check_bytes, poisoned

from kvthaw.kernels import HAS_TRITON, tiers
from kvthaw.kernels import collide as op
from kvthaw.kernels.query import rotate_queries
from kvthaw.kernels.srht import make_rotation
from lab.ablated_codes import identity

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
RAGGED, PADDED, CHUNKS = (16, 1, (0, 63)), (24, 1, (100,)), (8, 5, (2100,))
CASES = [  # shape, whether a group's mean query stands for all
    *((shape, False) for shape in SHAPES if torch.cuda.is_available() or shape[0] == 8),
    *(((*shape, torch.float16), False) for shape in (RAGGED, CHUNKS)),
    ((*PADDED, torch.bfloat16), True),
]
"""The interpreter takes a tenth of a second for every query head and 8 dimensions: shapes of fewer where a GPU takes all."""


def votes_one_by_one(similarity: list[float], sizes: list[int], limits: list[int]) -> list[int]:
    """Appendix B.2.1, key by key: a cluster's votes by the rank of its first key."""
    votes = []
    for own in similarity:
        before = sum(size for size, other in zip(sizes, similarity, strict=True) if other > own)
        votes.append(sum(before < limit for limit in limits))
    return votes


def test_tiers_by_hand() -> None:
    case = Case(64, 2, (900, 30), torch.float32, CPU)
    rotated = rotate_queries(case.query, case.heads, case.rotation, mean=False)
    similarity = tiers.similarities(rotated)
    votes = tiers.definition(similarity, case.summaries.sizes, case.limits)
    assert int(votes.max()) == 6
    for seq, head, p, b in ((0, 0, 0, 0), (0, 1, 1, 7), (1, 0, 1, 3)):
        numbers = similarity[seq, head, p, b], case.summaries.sizes[seq, head, b], case.limits[seq]
        want = votes_one_by_one(*(of.tolist() for of in numbers))
        assert votes[seq, head, p, b].tolist() == want
    q = rotated[0, 1, 1, :, 3]
    assert float(similarity[0, 1, 1, 3, 0b10000010]) == pytest.approx(
        float(q[1] + q[7] - q[[0, 2, 3, 4, 5, 6]].sum()), abs=1e-5
    )


def test_collisions_cover_rho() -> None:
    """The keys that collide in a subspace are the top rho, and the rest of their last cluster."""
    case = Case(64, 1, (2000,), torch.float32, CPU)
    table = tiers.definition(
        tiers.similarities(rotate_queries(case.query, case.heads, case.rotation, mean=False)),
        case.summaries.sizes,
        case.limits,
    )
    for b in range(8):
        size = case.summaries.sizes[0, 0, b]
        covered = int(size[table[0, 0, 0, b] > 0].sum())
        assert int(case.limits[0, 5]) <= covered < int(case.limits[0, 5]) + int(size.max())


def test_scores_by_hand() -> None:
    votes = torch.randint(0, 7, (2, 1, 5, 8, 256), dtype=torch.int32)
    ids = torch.randint(0, 256, (2, 1, 8, 40), dtype=torch.uint8)
    cut = op.shift(tiers.most_votes(8))
    scores = op.definition(tiers.pack(votes), ids, cut)
    by_head = votes.gather(4, ids[:, :, None].long().expand(-1, -1, 5, -1, -1)).sum(dim=3)
    assert torch.equal(scores, by_head.amax(dim=2))
    assert (cut, tiers.most_votes(8)) == (0, 48)


def test_the_most_votes_fit_their_bytes() -> None:
    votes = torch.full((1, 1, 8, 32, 256), 6, dtype=torch.int32)
    ids = torch.zeros((1, 1, 32, 3), dtype=torch.uint8)
    assert op.definition(tiers.pack(votes), ids, 0).tolist() == [[[192] * 3]]
    assert [op.shift(most) for most in (192, 96, 127, 128, 384, 1023)] == [1, 0, 0, 1, 2, 3]


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
@pytest.mark.parametrize(("shape", "mean"), CASES)
def test_kernels(shape: tuple[int, int, tuple[int, ...], torch.dtype], mean: bool, device: torch.device) -> None:
    dim, group, lengths, dtype = shape
    case = Case(dim, group, lengths, dtype, device)
    found = case.summaries
    cut = op.shift(tiers.most_votes(found.ids.shape[2]))
    totals = torch.full((len(lengths), case.heads, op.BINS), 99, dtype=torch.int32, device=device)
    with poisoned():
        rotated, table = tiers.launch(case.query, case.rotation, found.sizes, case.limits, totals, mean=mean)
    assert not totals.any()
    want = rotate_queries(case.query.cpu(), case.heads, make_rotation(dim, SEED), mean=mean)
    torch.testing.assert_close(rotated.values.cpu(), want, atol=5e-6, rtol=1e-5)
    check_bytes(rotated)
    # ranked from the kernel's own numbers, so that only its ranking is judged
    votes = tiers.definition(tiers.similarities(rotated.values), found.sizes, case.limits)
    assert torch.equal(table, tiers.pack(votes))
    want_scores = op.definition(table, found.ids, cut)
    with poisoned():
        scores = op.launch(table, found.ids, case.lengths, totals.zero_(), cut)
    for seq, n in enumerate(lengths):
        assert torch.equal(scores.scores[seq, :, :n].int(), want_scores[seq, :, :n])
        one_hot = torch.nn.functional.one_hot(want_scores[seq, :, :n].long(), op.BINS).sum(dim=1)
        at_least = one_hot.flip(1).cumsum(dim=1).flip(1).int()
        assert torch.equal(totals[seq], at_least)
        assert torch.equal(scores.counts[seq, :, :, : -(-n // op.CHUNK)].sum(dim=2).int(), at_least)


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
def test_scores_kernel_drops_low_bits(device: torch.device) -> None:
    """Where there are more votes than scores, of more subspaces than a program takes at once."""
    lengths = torch.tensor([op.CHUNK + 3, 0], dtype=torch.int32, device=device)
    votes = torch.randint(0, 7, (2, 1, 5, 32, 256), dtype=torch.int32)
    table = tiers.pack(votes).to(device)
    ids = torch.randint(0, 256, (2, 1, 32, 2 * op.CHUNK), dtype=torch.uint8).to(device)
    totals = torch.zeros((2, 1, op.BINS), dtype=torch.int32, device=device)
    cut = op.shift(tiers.most_votes(32))
    assert cut == 1
    with poisoned():
        found = op.launch(table, ids, lengths, totals, cut)
    assert torch.equal(found.scores[0, :, : op.CHUNK + 3].int(), op.definition(table, ids, cut)[0, :, : op.CHUNK + 3])
    assert totals[:, 0, 0].tolist() == [op.CHUNK + 3, 0]


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
def test_tiers_kernel_at_its_edges(device: torch.device) -> None:
    """Keys behind the query, queries that are as similar to all patterns or to half of them, and no keys."""
    rotation = identity(8, device)
    query = torch.randn(5, 1, 8, device=device)
    query[1] = 0.0
    query[2, :, 3:] = 0.0  # many equal ones, half of them 0 where two numbers cancel
    query[2, :, 1] = query[2, :, 0]
    sizes = torch.randint(0, 50, (5, 1, 1, 256), dtype=torch.int32, device=device)
    behind = tiers.similarities(rotate_queries(query, 1, rotation, mean=False))[:, 0, :, 0] <= 0
    sizes[0, 0, 0] *= behind[0].all(dim=0)
    sizes[4] = 0
    count = sizes.sum(dim=(1, 2, 3), dtype=torch.int32)
    limits = (count[:, None] * torch.tensor([0.05, 0.15, 0.3, 0.5, 0.75, 1.0], device=device)).int()
    totals = torch.full((5, 1, 64), 99, dtype=torch.int32, device=device)
    with poisoned():
        rotated, table = tiers.launch(query, rotation, sizes, limits, totals, mean=False)
    votes = tiers.definition(tiers.similarities(rotated.values), sizes, limits)
    assert torch.equal(table, tiers.pack(votes))
    assert (votes[0, 0, 0][:, behind[0, 0]] > 0).any()
    assert (votes[1] == 6).all()
    assert not votes[4].any()
