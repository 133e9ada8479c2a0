"""Estimated scores of candidates, and the best of them."""

from __future__ import annotations

import itertools

import pytest
import torch
from paris import SHAPES, Case, poisoned
from torch import Tensor

from kvthaw.errors import ConfigError
from kvthaw.kernels import HAS_TRITON, topk
from kvthaw.kernels import rerank as op
from kvthaw.kernels.query import Rotated, in_bytes, rotate_queries
from lab.definitions import topk as definition

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
triton_only = pytest.mark.skipif(not HAS_TRITON, reason="needs triton")


def candidates(case: Case) -> torch.Tensor:
    """Any ascending positions, the first wanted of each row."""
    out = torch.full((len(case.keys), case.heads, case.width), -1, dtype=torch.int32)
    for seq, n in enumerate(case.lengths.tolist()):
        want = int(case.wanted[seq])
        for head in range(case.heads):
            out[seq, head, :want] = torch.randperm(n)[:want].sort().values
    return out.to(case.query.device)


def turned(case: Case) -> Rotated:
    return in_bytes(rotate_queries(case.query, case.heads, case.rotation, mean=False))


@pytest.mark.parametrize("bits", [4, 3])
def test_definition_by_hand(bits: int) -> None:
    case = Case(64, 2, (50, 20), torch.float32, CPU, bits=bits)
    rotated = turned(case)
    at = candidates(case)
    scores = op.definition(rotated, case.summaries, at, case.quantizer)
    seq, head, p, m = 1, 1, 0, 3
    place = int(at[seq, head, m])
    word, table = case.summaries.codes[seq, head, place], case.summaries.weights
    v, w = case.quantizer.directions(word), case.quantizer.weights(word, None if table is None else table[seq, head, place])
    want = sum(float(w[b] * (v[b] * rotated.values[seq, head, p, :, b]).sum()) for b in range(8))
    assert float(scores[seq, head, p, m]) == pytest.approx(want, rel=1e-2)
    exact = float(case.query[seq, head * 2 + p].float() @ case.keys[seq][head, place].float())
    assert float(scores[seq, head, p, m]) == pytest.approx(exact, abs=3.0)
    assert (scores[1, :, :, 20:] == -torch.inf).all()


@triton_only
@pytest.mark.parametrize("bits", [4, 3])
@pytest.mark.parametrize(("shape", "run"), list(zip(SHAPES, itertools.cycle([64, 8]), strict=False)))
def test_rerank_kernel(
    shape: tuple[int, int, tuple[int, ...], torch.dtype],
    run: int,
    bits: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dim, group, lengths, dtype = shape
    monkeypatch.setattr(op, "shape", lambda run: (max(run, 16), 3))
    case = Case(dim, group, lengths, dtype, device, bits=bits)
    rotated = turned(case)
    at = candidates(case)
    scale = dim**-0.5
    with poisoned():
        found = op.launch(rotated, case.summaries, at.clamp(min=0).contiguous(), case.wanted, case.quantizer, scale, run)
    want = op.definition(rotated, case.summaries, at, case.quantizer)
    rounding = 2**-18 * sizes(rotated, case, at) + halves(rotated, case, at)
    for seq, n in enumerate(case.wanted.tolist()):
        got = found.scores[seq, :, :, :n]
        assert ((got - want[seq, :, :, :n]).abs() <= rounding[seq, :, :, :n] + 1e-5).all()
        if n:
            tops, sums = found.parts[seq].unbind(dim=3)
            total = torch.logsumexp(tops + sums.log(), dim=2)
            torch.testing.assert_close(total, torch.logsumexp(got * scale, dim=2), atol=1e-5, rtol=1e-5)
            tiles = torch.nn.functional.pad(got, (0, -n % run), value=-torch.inf).unflatten(2, (-1, run))
            assert torch.equal(found.peaks[seq, :, :, : tiles.shape[2]], tiles.amax(dim=3))


def sizes(rotated: Rotated, case: Case, at: torch.Tensor) -> torch.Tensor:
    """Sums of the products' sizes, [L, H, P, width]."""
    directions, weights = op.gathered(case.summaries, at, case.quantizer)
    keys = directions * weights[..., None]
    return torch.matmul(rotated.rounded().flatten(3).abs(), keys.flatten(3).abs().transpose(2, 3))


def halves(rotated: Rotated, case: Case, at: torch.Tensor) -> torch.Tensor:
    """Half of a whole number of levels times query, in each subspace, which the kernel's sums may lose: [L, H, P, width]."""
    return torch.matmul(rotated.factors, op.gathered(case.summaries, at, case.quantizer)[1].transpose(2, 3)) / 256


def draw(
    seqs: int, heads: int, group: int, wanted: tuple[int, ...], ties: bool, run: int, device: torch.device
) -> op.Estimates:
    """Random estimates with the parts and peaks that the kernel would leave; anything beyond the wanted ones."""
    width = -(-max(*wanted, 1) // op.TILE) * op.TILE
    scores = torch.randn(seqs, heads, group, width, device=device) * 5
    if ties:
        scores = scores.round() / 2
    live = torch.arange(width, device=device) < torch.tensor(wanted, device=device)[:, None]
    known = scores.masked_fill(~live[:, None, None], -torch.inf)
    splits = 5
    tiles = torch.nn.functional.pad(known, (0, -width % (8 * splits)), value=-torch.inf)
    logits = tiles.unflatten(3, (-1, splits, 8)).transpose(3, 4).flatten(4)
    top = logits.amax(dim=4)
    sums = torch.exp(logits - torch.where(top == -torch.inf, 0.0, top)[..., None]).sum(dim=4)
    peaks = known.unflatten(3, (-1, run)).amax(dim=4)
    return op.Estimates(scores, torch.stack((top, sums), dim=4), peaks, run)


def check_scores(before: Tensor, found: op.Estimates, at: Tensor, rows: Tensor, first: int) -> None:
    """Only the scores of the rows have become -inf."""
    chosen = ((at + first)[..., None] == rows[:, :, None]).any(dim=3)
    assert torch.equal(found.scores, before.masked_fill(chosen[:, :, None], -torch.inf))


CASES = [  # wanted, group, k, candidates a peak
    ((1,), 1, 1, 64),
    ((700, 0, 20), 1, 30, 32),
    ((700, 0, 20), 4, 30, 8),
    ((5000,), 2, 100, 32),
    ((300, 299), 3, 64, 16),
    ((9000,), 1, 10, 4),
]


@triton_only
@pytest.mark.parametrize(
    ("wanted", "group", "k", "run", "ties", "policy", "shared"),
    [
        (*case, ties, policy, (turn + ties) % 2 == 1)
        for turn, case in enumerate(CASES)
        for ties, policy in ((False, "max"), (True, "mean"))
    ],
)
def test_topk_kernel(
    wanted: tuple[int, ...], group: int, k: int, run: int, policy: topk.Merge, ties: bool, shared: bool, device: torch.device
) -> None:
    """shared: the softmax covers other tokens too, and no row is too light."""
    found = draw(len(wanted), 2, group, wanted, ties, run, device)
    width = found.scores.shape[3]
    at = torch.arange(width, dtype=torch.int32, device=device).expand(len(wanted), 2, -1).contiguous() * 3
    count = torch.tensor(wanted, dtype=torch.int32, device=device)
    held = torch.randn(len(wanted), 2, group, device=device) * 5 if shared else None
    floor = None if held is None else topk.Floor(-1e9, held, count, 0)
    before = found.scores.clone()
    with poisoned():
        rows, counts = topk.launch(found, at, count, k, 4, 1.0, policy, floor)
    check_scores(before, found, at, rows, 4)
    live = torch.arange(width, device=device) < count[:, None, None]
    merged = topk.merge(before.masked_fill(~live[:, :, None], -torch.inf), 1.0, policy, held)
    want, want_counts = definition(merged, at.masked_fill(~live, -1), k, 4)
    assert torch.equal(counts, want_counts)
    if group == 1 and not shared:
        assert torch.equal(rows, want)
        return
    assert torch.equal(rows < 0, want < 0)
    value = torch.where(want >= 0, merged.gather(2, ((want - 4) // 3).clamp(min=0).long()), 0.0).sort(dim=2).values
    got = torch.where(rows >= 0, merged.gather(2, ((rows - 4) // 3).clamp(min=0).long()), 0.0).sort(dim=2).values
    torch.testing.assert_close(got, value, atol=1e-4, rtol=1e-5)  # the same set up to near ties
    assert (rows[:, :, 1:] > rows[:, :, :-1]).logical_or(rows[:, :, 1:] < 0).all()


def test_rows_below_a_floor_go_from_long_sequences() -> None:
    torch.manual_seed(0)
    merged, at = torch.randn(2, 3, 40), torch.arange(40, dtype=torch.int32).expand(2, 3, -1)
    floor = topk.Floor(0.4, torch.zeros(2, 3, 1), torch.tensor([31, 30], dtype=torch.int32), 30)
    rows, counts = definition(merged, at, 12, 7, floor)
    for b in range(2):
        for h in range(3):
            best = merged[b, h].argsort(descending=True)[:12].tolist()
            mine = sorted(place + 7 for place in best if b == 1 or merged[b, h, place] >= 0.4)
            assert rows[b, h].tolist() == mine + [-1] * (12 - len(mine))
            assert counts[b, h] == len(mine)


@triton_only
@pytest.mark.parametrize(
    ("wanted", "group", "k", "run", "part", "policy"),
    [
        (*case, part, ("max", "mean")[(turn + i) % 2])
        for turn, case in enumerate(CASES)
        for i, part in enumerate((0.0, 0.9, 0.99, 1.0))
    ],
)
def test_topk_kernel_with_a_floor(
    wanted: tuple[int, ...], group: int, k: int, run: int, policy: topk.Merge, part: float, device: torch.device
) -> None:
    """Sequences of at most 299 tokens keep all rows. A part of the weights is below the floor, which lies in a gap."""
    found = draw(len(wanted), 2, group, wanted, False, run, device)
    width, held = found.scores.shape[3], torch.randn(len(wanted), 2, group, device=device)
    at = torch.arange(width, dtype=torch.int32, device=device).expand(len(wanted), 2, -1).contiguous()
    count = torch.tensor(wanted, dtype=torch.int32, device=device)
    live = at < count[:, None, None]
    merged = topk.merge(found.scores.masked_fill(~live[:, :, None], -torch.inf), 1.0, policy, held)
    values = merged[merged.isfinite()].sort().values
    begin = int(part * max(0, len(values) - 20))
    gap = begin + int(values[begin : begin + 20].diff().argmax())
    least = float(values[gap : gap + 2].mean())
    floor, before = topk.Floor(least, held, count, 299), found.scores.clone()
    with poisoned():
        rows, counts = topk.launch(found, at, count, k, 4, 1.0, policy, floor)
    check_scores(before, found, at, rows, 4)
    want, want_counts = definition(merged, at.masked_fill(~live, -1), k, 4, floor)
    assert torch.equal(counts, want_counts)
    assert torch.equal(rows < 0, want < 0)
    weights = [torch.where(one >= 0, merged.gather(2, (one - 4).clamp(min=0).long()), 0.0) for one in (rows, want)]
    torch.testing.assert_close(*(one.sort(dim=2).values for one in weights), atol=1e-4, rtol=1e-5)
    assert (rows[:, :, 1:] > rows[:, :, :-1]).logical_or(rows[:, :, 1:] < 0).all()


@triton_only
@pytest.mark.parametrize("spread", ["one run", "all equal"])
def test_topk_kernel_where_the_best_stand_together(spread: str, device: torch.device) -> None:
    """Many of the best in few runs, and nothing but ties: the lowest positions."""
    found = draw(1, 1, 1, (3000,), False, 32, device)
    if spread == "one run":
        found.scores[0, 0, 0, 640:700] += 100
    else:
        found.scores[:] = -1.5
    known = torch.arange(found.scores.shape[3], device=device) < 3000
    found.peaks.copy_(found.scores.masked_fill(~known, -torch.inf).unflatten(3, (-1, 32)).amax(dim=4))
    at = torch.arange(found.scores.shape[3], dtype=torch.int32, device=device)[None, None]
    before = found.scores.clone()
    rows, _ = topk.launch(found, at, torch.tensor([3000], dtype=torch.int32, device=device), 50, 0, 1.0, "max")
    check_scores(before, found, at, rows, 0)
    want, _ = definition(before[:, :, 0].masked_fill(~known, -torch.inf), at.masked_fill(~known, -1), 50, 0)
    assert torch.equal(rows, want)


@pytest.mark.parametrize(
    ("width", "k", "run"), [(13_120, 100, 16), (104_896, 100, 32), (1 << 20, 100, 64), (13_120, 1000, 4), (64, 1, 8)]
)
def test_runs_fit_a_program(width: int, k: int, run: int) -> None:
    assert topk.run_length(width, k) == run
    assert run * (1 << (k - 1).bit_length()) <= topk.MOST
    assert topk.run_length(4 << 20, k) is None
    assert topk.run_length(width, topk.MOST) is None


def test_the_largest_k_is_a_plain_sort() -> None:
    found = torch.randn(1, 1, 1, 9000)
    at, before = torch.arange(9000, dtype=torch.int32).expand(1, 1, -1), found.clone()
    rows, counts = topk.topk(found, at, torch.tensor([8900], dtype=torch.int32), 8500, 0, 1.0, "max")
    assert counts.tolist() == [[8500]]
    assert set(rows[0, 0].tolist()) == set(before[0, 0, 0, :8900].topk(8500).indices.tolist())
    assert torch.equal(found.isinf()[0, 0, 0].nonzero()[:, 0].int(), rows[0, 0].sort().values)


def test_more_rows_than_candidates_are_refused() -> None:
    found = torch.randn(1, 1, 1, 64)
    with pytest.raises(ConfigError, match="65 rows are to be selected from 64 candidates"):
        topk.topk(found, torch.zeros(1, 1, 64, dtype=torch.int32), torch.ones(1, dtype=torch.int32), 65, 0, 1.0, "max")
