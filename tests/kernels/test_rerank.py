"""Estimated scores of candidates, and the best of them."""

from __future__ import annotations

import pytest
import torch
from paris import SHAPES, Case, poisoned

from kvthaw.errors import ConfigError
from kvthaw.kernels import HAS_TRITON, topk
from kvthaw.kernels import rerank as op
from kvthaw.kernels.encode import decode
from kvthaw.kernels.tiers import rotate_queries

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
triton_only = pytest.mark.skipif(not HAS_TRITON, reason="needs triton")


def candidates(case: Case) -> torch.Tensor:
    """Any ascending positions, the first wanted of each row."""
    out = torch.full((len(case.keys), case.heads, case.width), -1, dtype=torch.int32)
    for lane, n in enumerate(case.lengths.tolist()):
        want = int(case.wanted[lane])
        for head in range(case.heads):
            out[lane, head, :want] = torch.randperm(n)[:want].sort().values
    return out.to(case.query.device)


def test_definition_by_hand() -> None:
    case = Case(64, 2, (50, 20), torch.float32, CPU)
    rotated = rotate_queries(case.query, case.heads, case.rotation, mean=False)
    at = candidates(case)
    scores = op.definition(rotated, case.summaries.codes, case.summaries.weights, at, case.quantizer)
    lane, head, p, m = 1, 1, 0, 3
    place = int(at[lane, head, m])
    v = decode(case.summaries.codes[lane, head, place], case.quantizer)
    w = case.summaries.weights[lane, head, place].float()
    want = sum(float(w[b] * (v[b] * rotated[lane, head, p, :, b]).sum()) for b in range(8))
    assert float(scores[lane, head, p, m]) == pytest.approx(want, rel=1e-4)
    exact = float(case.query[lane, head * 2 + p].float() @ case.keys[lane][head, place].float())
    assert float(scores[lane, head, p, m]) == pytest.approx(exact, abs=3.0)
    assert (scores[1, :, :, 20:] == -torch.inf).all()


@triton_only
@pytest.mark.parametrize(("dim", "group", "lengths", "dtype"), SHAPES)
def test_rerank_kernel(dim: int, group: int, lengths: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    case = Case(dim, group, lengths, dtype, device)
    rotated = rotate_queries(case.query, case.heads, case.rotation, mean=False)
    at = candidates(case)
    scale = dim**-0.5
    with poisoned():
        found = op.launch(rotated, case.summaries, at.clamp(min=0).contiguous(), case.wanted, case.quantizer, scale)
    want = op.definition(rotated, case.summaries.codes, case.summaries.weights, at, case.quantizer)
    assert found.parts is not None
    for lane, n in enumerate(case.wanted.tolist()):
        torch.testing.assert_close(found.scores[lane, :, :, :n], want[lane, :, :, :n], atol=1e-4, rtol=1e-5)
        if n:
            tops, sums = found.parts[lane, :, :, : -(-n // op.TILE)].unbind(dim=3)
            total = torch.logsumexp(tops + sums.log(), dim=2)
            torch.testing.assert_close(total, torch.logsumexp(want[lane, :, :, :n] * scale, dim=2), atol=1e-4, rtol=1e-5)


def draw(lanes: int, heads: int, group: int, wanted: tuple[int, ...], ties: bool, device: torch.device) -> op.Estimates:
    """Random estimates with the parts that the kernel would leave; anything beyond the wanted ones."""
    width = -(-max(*wanted, 1) // op.TILE) * op.TILE
    scores = torch.randn(lanes, heads, group, width, device=device) * 5
    if ties:
        scores = scores.round() / 2
    live = torch.arange(width, device=device) < torch.tensor(wanted, device=device)[:, None]
    logits = scores.masked_fill(~live[:, None, None], -torch.inf).unflatten(3, (-1, op.TILE))
    top = logits.amax(dim=4)
    sums = torch.exp(logits - torch.where(top == -torch.inf, 0.0, top)[..., None]).sum(dim=4)
    return op.Estimates(scores, torch.stack((top, sums), dim=4))


CASES = [  # wanted, group, k, candidates a program
    ((1,), 1, 1, None),
    ((700, 0, 20), 1, 30, None),
    ((700, 0, 20), 4, 30, 64),
    ((5000,), 2, 100, 512),
    ((300, 299), 3, 64, 128),
]


@triton_only
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("policy", ["max", "mean"])
@pytest.mark.parametrize(("wanted", "group", "k", "chunk"), CASES)
def test_topk_kernel(
    wanted: tuple[int, ...], group: int, k: int, chunk: int | None, policy: topk.Merge, ties: bool, device: torch.device
) -> None:
    found = draw(len(wanted), 2, group, wanted, ties, device)
    width = found.scores.shape[3]
    at = torch.arange(width, dtype=torch.int32, device=device).expand(len(wanted), 2, -1).contiguous() * 3
    count = torch.tensor(wanted, dtype=torch.int32, device=device)
    with poisoned():
        rows, counts = topk.launch(found, at, count, k, 4, 1.0, policy, chunk)
    live = torch.arange(width, device=device) < count[:, None, None]
    merged = topk.merge(found.scores.masked_fill(~live[:, :, None], -torch.inf), 1.0, policy)
    want, want_counts = topk.definition(merged, at.masked_fill(~live, -1), k, 4)
    assert torch.equal(counts, want_counts)
    if group == 1:
        assert torch.equal(rows, want)
        return
    assert torch.equal(rows < 0, want < 0)
    value = torch.where(want >= 0, merged.gather(2, ((want - 4) // 3).clamp(min=0).long()), 0.0).sort(dim=2).values
    got = torch.where(rows >= 0, merged.gather(2, ((rows - 4) // 3).clamp(min=0).long()), 0.0).sort(dim=2).values
    torch.testing.assert_close(got, value, atol=1e-4, rtol=1e-5)  # the same set up to near ties
    assert (rows[:, :, 1:] > rows[:, :, :-1]).logical_or(rows[:, :, 1:] < 0).all()


def test_the_largest_k_is_a_plain_sort() -> None:
    found = op.Estimates(torch.randn(1, 1, 1, 9000))
    at = torch.arange(9000, dtype=torch.int32).expand(1, 1, -1)
    rows, counts = topk.topk(found, at, torch.tensor([8900], dtype=torch.int32), 8500, 0, 1.0, "max")
    assert counts.tolist() == [[8500]]
    assert set(rows[0, 0].tolist()) == set(found.scores[0, 0, 0, :8900].topk(8500).indices.tolist())


def test_more_rows_than_candidates_are_refused() -> None:
    found = op.Estimates(torch.randn(1, 1, 1, 64))
    with pytest.raises(ConfigError, match="65 rows are to be selected from 64 candidates"):
        topk.topk(found, torch.zeros(1, 1, 64, dtype=torch.int32), torch.ones(1, dtype=torch.int32), 65, 0, 1.0, "max")
