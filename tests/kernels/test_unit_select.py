"""Choosing units one after the other, against the definition in tensors and the kernels."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON, unit_scores
from kvthaw.kernels import unit_select as op
from kvthaw.kernels.unit_scores import RecentQueries

NAN = float("nan")


def tables(
    sizes: list[int],
    heads: int,
    dim: int,
    *,
    wide: bool,
    mapped: bool,
    static: int,
    dtype: torch.dtype,
    capacity: int = 0,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """digests, stops, order and counts of sequences with so many units; what lies behind the units is NaN or nonsense."""
    g = torch.Generator().manual_seed(seed)
    units = max([capacity, *sizes])
    width = dim * (1 + wide)
    digests = torch.full((len(sizes), heads, units, width), NAN).to(dtype)
    stops = torch.full((len(sizes), heads, units + 1), -7, dtype=torch.int32)
    lengths = torch.randint(0, 9, (len(sizes), heads, units), generator=g)
    total = static + int(lengths.sum(dim=2).max()) + 5
    order = torch.full((len(sizes), heads, total), -9, dtype=torch.int32)
    for b, n in enumerate(sizes):
        tile = torch.randn(heads, n, width, generator=g)
        if wide:
            tile[..., dim:] = tile[..., dim:].abs()
        digests[b, :, :n] = tile.to(dtype)
        stops[b, :, 0] = static
        stops[b, :, 1 : n + 1] = static + lengths[b, :, :n].cumsum(1).int()
        for h in range(heads):
            end = int(stops[b, h, n])
            order[b, h, :end] = 4 + torch.randperm(end, generator=g).int()
    counts = torch.tensor(sizes, dtype=torch.int32)
    return digests, stops, order if mapped else None, counts


CASES = [
    # sequences' units, heads, group, dim, budget, wide, mapped, static, policy, dtype
    ([1], 1, 1, 64, 5, False, True, 0, "max", torch.float32),
    ([63, 7], 2, 4, 96, 40, True, True, 6, "max", torch.bfloat16),
    ([130, 0, 64], 2, 1, 64, 33, True, False, 0, "max", torch.float16),
    ([70], 1, 8, 128, 100, False, True, 0, "mean", torch.float32),
    ([40, 41], 2, 4, 80, 1, False, True, 0, "mean_query", torch.bfloat16),
    ([20], 2, 2, 256, 1000, True, True, 3, "mean", torch.float32),
    ([30], 1, 2, 192, 4, True, True, 9, "max", torch.float32),
    ([2500, 1025], 1, 2, 64, 300, False, True, 0, "max", torch.float32),  # several chunks of units
    ([1030], 1, 1, 64, 9000, False, False, 0, "max", torch.float32),
]


def plain(
    query: Tensor, digests: Tensor, stops: Tensor, order: Tensor | None, counts: Tensor, *, first: int, budget: int, scale: float,
    policy: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The definition head by head and unit by unit."""
    heads = stops.shape[1]
    all_scores = unit_scores.definition(query, digests, stops, counts, scale=scale, mean=policy == "mean_query")
    rows = torch.full((query.shape[0], heads, budget), -1, dtype=torch.int32)
    for b, h in product(range(query.shape[0]), range(heads)):
        bounds = stops[b, h, : int(counts[b]) + 1].tolist()
        sizes = torch.tensor(bounds).diff().float().to(query.device)
        scores = all_scores[b, h, :, : len(sizes)]
        if len(scores) > 1:
            scores = scores - torch.logsumexp(scores + sizes.log(), dim=1, keepdim=True).clamp(min=-3e38)
        merged = scores.amax(dim=0) if policy == "max" else torch.logsumexp(scores, dim=0)
        room = budget - min(bounds[0], budget)
        taken = [0] * len(sizes)
        for u in torch.sort(merged, descending=True, stable=True).indices.tolist():
            taken[u] = min(room, bounds[u + 1] - bounds[u])
            room -= taken[u]
        spans = [(0, min(bounds[0], budget)), *((bounds[u], bounds[u] + n) for u, n in enumerate(taken))]
        places = [i for span in spans for i in range(*span)]
        chosen = [first + i for i in places] if order is None else order[b, h, places].tolist()
        rows[b, h, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return rows.to(query.device), (rows >= 0).sum(dim=2, dtype=torch.int32).to(query.device)


@pytest.fixture(params=[op.ALONE, 0], ids=["at once", "by chunks"])
def alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways in which kernels choose."""
    monkeypatch.setattr(op, "ALONE", request.param)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("path", ["definition", "kernels"])
def test_choice_is_that_of_unit_after_unit(case: tuple[Any, ...], path: str, device: torch.device) -> None:
    sizes, heads, group, dim, budget, wide, mapped, static, policy, dtype = case
    if path == "kernels" and not HAS_TRITON:
        pytest.skip("no Triton")
    made = tables(sizes, heads, dim, wide=wide, mapped=mapped, static=static, dtype=dtype, capacity=max(sizes) + 3)
    digests, stops, order, counts = (None if t is None else t.to(device) for t in made)
    query = torch.randn(len(sizes), heads * group, dim).to(dtype).to(device)
    how = {"first": 4, "budget": budget, "scale": dim**-0.5, "policy": policy}
    wanted, wanted_counts = plain(query, digests, stops, order, counts, **how)
    rows, taken = (op.definition if path == "definition" else op.launch)(query, digests, stops, order, counts, **how)
    assert torch.equal(rows, wanted)
    assert torch.equal(taken, wanted_counts)
    assert rows.dtype == taken.dtype == torch.int32


@pytest.mark.parametrize("path", ["definition", "kernels"])
def test_of_equal_scores_the_earlier_goes_first_and_the_last_is_cut(path: str, device: torch.device) -> None:
    run = op.definition if path == "definition" else op.launch
    if path == "kernels" and not HAS_TRITON:
        pytest.skip("no Triton")
    digests = torch.ones(1, 1, 6, 64, device=device)
    digests[0, 0, 4] = 2.0
    stops = torch.tensor([[[0, 3, 3, 6, 9, 12, 15]]], dtype=torch.int32, device=device)
    counts = torch.tensor([6], dtype=torch.int32, device=device)
    query = torch.ones(1, 1, 64, device=device)
    for budget, wanted in [(3, [9, 10, 11]), (5, [0, 1, 9, 10, 11]), (8, [0, 1, 2, 3, 4, 9, 10, 11])]:
        rows, taken = run(query, digests, stops, None, counts, first=0, budget=budget, scale=1.0, policy="max")
        assert rows[0, 0].tolist() == wanted
        assert taken.tolist() == [[budget]]


@pytest.mark.usefixtures("alone")
@pytest.mark.skipif(not HAS_TRITON, reason="no Triton")
def test_ties_across_chunks_go_to_the_earlier_unit(device: torch.device) -> None:
    digests = torch.zeros(1, 1, 2100, 64, device=device)
    digests[0, 0, 2050:2060, 0] = 1.0
    stops = torch.arange(2101, dtype=torch.int32, device=device)[None, None].contiguous()
    counts = torch.tensor([2100], dtype=torch.int32, device=device)
    query = torch.ones(1, 1, 64, device=device)
    rows, _ = op.launch(query, digests, stops, None, counts, first=0, budget=1100, scale=1.0, policy="max")
    assert rows[0, 0].tolist() == [*range(1090), *range(2050, 2060)]


@pytest.mark.usefixtures("alone")
def test_extreme_scores_keep_their_order(device: torch.device) -> None:
    scores = [-3e38, 3e38, -1e-30, 0.0, 1e-30, -5.0, 5.0, 2.0]
    digests = torch.zeros(1, 1, 8, 64, device=device)
    digests[0, 0, :, 0] = torch.tensor(scores)
    query = torch.zeros(1, 1, 64, device=device)
    query[0, 0, 0] = 1.0
    stops = torch.arange(9, dtype=torch.int32, device=device)[None, None].contiguous()
    counts = torch.tensor([8], dtype=torch.int32, device=device)
    ranked = sorted(range(8), key=lambda i: -scores[i])
    for run, budget in product([op.definition] + [op.launch] * HAS_TRITON, (1, 3, 8)):
        rows, _ = run(query, digests, stops, None, counts, first=0, budget=budget, scale=1.0, policy="max")
        assert rows[0, 0].tolist() == sorted(ranked[:budget])


@pytest.mark.skipif(not HAS_TRITON, reason="no Triton")
@pytest.mark.parametrize(("wide", "mean", "dtype"), [(False, False, torch.float32), (True, True, torch.bfloat16)])
def test_scores_are_the_definition(wide: bool, mean: bool, dtype: torch.dtype, device: torch.device) -> None:
    made = tables([70, 3], 2, 96, wide=wide, mapped=False, static=0, dtype=dtype, capacity=80)
    digests, stops, _, counts = (None if t is None else t.to(device) for t in made)
    query = torch.randn(2, 8, 96).to(dtype).to(device)
    wanted = unit_scores.definition(query, digests, stops, counts, scale=0.1, mean=mean)
    found, _ = unit_scores.launch(query, digests, stops, counts, scale=0.1, mean=mean)
    near = 2e-2 if dtype == torch.bfloat16 else 1e-5  # the interpreter cuts the mean query to bfloat16 where a GPU rounds it
    for seq, units in enumerate((70, 3)):
        torch.testing.assert_close(found[seq, ..., :units], wanted[seq, ..., :units], rtol=near, atol=near)


@pytest.mark.skipif(not HAS_TRITON, reason="no Triton")
@pytest.mark.parametrize("mean", [False, True])
def test_many_queries_of_wide_digests(mean: bool, device: torch.device) -> None:
    """As many as one program's shared memory has no room for."""
    made = tables([66], 1, 256, wide=True, mapped=False, static=0, dtype=torch.float32, capacity=70)
    digests, stops, _, counts = (None if t is None else t.to(device) for t in made)
    query = torch.randn(1, 33, 256, device=device)
    how: dict[str, Any] = {"first": 0, "budget": 20, "scale": 0.1, "policy": "mean_query" if mean else "mean"}
    wanted = unit_scores.definition(query, digests, stops, counts, scale=0.1, mean=mean)
    recent = RecentQueries(
        torch.zeros(1, 33, 2, 256, device=device),
        torch.zeros(1, 2, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
    )
    found, _ = unit_scores.launch(query, digests, stops, counts, scale=0.1, mean=mean, recent=recent)
    torch.testing.assert_close(found[..., :66], wanted[..., :66], rtol=1e-4, atol=1e-4)
    assert torch.equal(recent.queries[:, :, 0], query)
    if HAS_TRITON:
        rows, _ = op.launch(query, digests, stops, None, counts, **how)
        expected, _ = op.definition(query, digests, stops, None, counts, **how)
        assert torch.equal(rows, expected)


@pytest.mark.usefixtures("alone")
def test_units_that_are_all_empty_give_nothing(device: torch.device) -> None:
    digests, query = torch.ones(1, 1, 3, 64, device=device), torch.ones(1, 2, 64, device=device)
    stops = torch.zeros(1, 1, 4, dtype=torch.int32, device=device)
    counts = torch.tensor([3], dtype=torch.int32, device=device)
    for run in [op.definition] + [op.launch] * HAS_TRITON:
        rows, taken = run(query, digests, stops, None, counts, first=0, budget=5, scale=1.0, policy="mean")
        assert rows.tolist() == [[[-1] * 5]]
        assert taken.tolist() == [[0]]


@pytest.mark.parametrize(("path", "mean", "units"), [("kernels", False, 70), ("kernels", True, 0), ("definition", False, 70)])
def test_queries_are_noted_in_the_same_launches(path: str, mean: bool, units: int, device: torch.device) -> None:
    if path == "kernels" and not HAS_TRITON:
        pytest.skip("no Triton")
    made = tables([units, 0], 2, 48, wide=not mean, mapped=True, static=2, dtype=torch.bfloat16, capacity=75)
    digests, stops, order, counts = (t.to(device) for t in made if t is not None)
    how: dict[str, Any] = {"first": 4, "budget": 20, "scale": 0.1, "policy": "mean_query" if mean else "max"}
    asked, seen = torch.full((2, 8, 5, 48), 7.0, dtype=torch.bfloat16, device=device), torch.zeros(2, 5, device=device)
    steps = torch.full((1,), 4, dtype=torch.int64, device=device)
    for step in (4, 5):
        query = torch.randn(2, 8, 48).bfloat16().to(device)
        run = op.launch if path == "kernels" else op.unit_select
        rows, _ = run(query, digests, stops, order, counts, **how, recent=RecentQueries(asked, seen, steps))
        assert torch.equal(rows, op.definition(query, digests, stops, order, counts, **how)[0])
        assert torch.equal(asked[:, :, step % 5], query)
        assert int(steps) == step + 1
    assert (asked[:, :, 1:4] == 7.0).all()
    assert seen.tolist() == [[1.0, 0.0, 0.0, 0.0, 1.0]] * 2


@pytest.mark.usefixtures("alone")
@pytest.mark.skipif(not HAS_TRITON, reason="no Triton")
@pytest.mark.parametrize(("sizes", "budget"), [([2100], 2000), ([2100], 700)])
def test_chunks_that_leave_many_units(sizes: list[int], budget: int, device: torch.device) -> None:
    """More than the last kernel holds in registers, and fewer."""
    digests, stops, order, counts = (
        t.to(device) for t in tables(sizes, 1, 64, wide=False, mapped=True, static=1, dtype=torch.float32) if t is not None
    )
    query = torch.randn(len(sizes), 2, 64, device=device)
    how: dict[str, Any] = {"first": 4, "budget": budget, "scale": 0.2, "policy": "mean"}
    rows, taken = op.launch(query, digests, stops, order, counts, **how)
    wanted, wanted_counts = op.definition(query, digests, stops, order, counts, **how)
    assert torch.equal(rows, wanted)
    assert torch.equal(taken, wanted_counts)


@pytest.mark.parametrize(("tile", "wanted"), [(16 << 10, (3, 4)), (32 << 10, (3, 2)), (64 << 10, (1, 3)), (256 << 10, (1, 1))])
def test_programs_share_the_memory_of_a_multiprocessor(tile: int, wanted: tuple[int, int]) -> None:
    assert unit_scores.plan(tile) == wanted
