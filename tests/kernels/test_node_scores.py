"""Scores of nodes: the definition against the formula in float64, the kernel against the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.unit_scores import BLOCK
from kvthaw_baselines.kernels import node_digests, node_scores
from shapes import DTYPES

NAN = float("nan")


def tables(nodes: list[int], heads: int, dim: int, outliers: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """digests, stops and counts of sequences with so many nodes, some of them empty; behind them NaN and nonsense."""
    g = torch.Generator().manual_seed(dim)
    room, width = max(nodes) + 3, node_digests.row_width(dim, outliers)
    digests = torch.full((len(nodes), heads, room, width), NAN).to(dtype)
    stops = torch.full((len(nodes), heads, room + 1), -7, dtype=torch.int32)
    for b, n in enumerate(nodes):
        rows = torch.randn(heads, n, width, generator=g)
        rows[..., -node_digests.TAIL :].abs_()
        digests[b, :, :n] = rows.to(dtype)
        stops[b, :, 0] = 0
        stops[b, :, 1 : n + 1] = torch.randint(0, 5, (heads, n), generator=g).cumsum(1).int()
    return digests, stops, torch.tensor(nodes, dtype=torch.int32)


CASES = [  # nodes, heads, group, dim, outliers, dtype
    ([1], 1, 1, 64, 2, torch.float32),
    ([70, 0, 3], 2, 4, 96, 2, torch.bfloat16),
    ([64, 65], 1, 8, 128, 0, torch.float16),
    ([20], 2, 1, 80, 5, torch.bfloat16),
    ([9], 1, 2, 256, 1, torch.float32),
]


@pytest.mark.parametrize(("nodes", "heads", "group", "dim", "outliers", "dtype"), CASES)
def test_the_best_that_a_node_may_hold(
    nodes: list[int], heads: int, group: int, dim: int, outliers: int, dtype: torch.dtype, device: torch.device
) -> None:
    made = tables(nodes, heads, dim, outliers, dtype)
    query = torch.randn(len(nodes), heads * group, dim).to(dtype)
    on = [t.to(device) for t in made]
    found = node_scores.definition(query.to(device), *on, scale=0.3, reach=2.0).cpu()
    digests, stops, _ = made
    for b, n in enumerate(nodes):
        for hq in range(heads * group):
            h, q = hq // group, query[b, hq].double()
            for u in range(n):
                row = digests[b, h, u].double()
                points = row[: dim * (1 + outliers)].view(-1, dim) @ q
                points[0] += 2.0 * float(row[dim * (1 + outliers)]) * q.norm()
                wanted = 0.3 * float(points.max()) if stops[b, h, u + 1] > stops[b, h, u] else -torch.inf
                assert found[b, h, hq % group, u].item() == pytest.approx(wanted, rel=1e-4, abs=1e-4)
            assert (found[b, h, hq % group, n:] == -torch.inf).all()


@pytest.mark.skipif(not HAS_TRITON, reason="no Triton")
@pytest.mark.parametrize(("nodes", "heads", "group", "dim", "outliers", "dtype"), CASES)
def test_the_kernel_is_the_definition(
    nodes: list[int], heads: int, group: int, dim: int, outliers: int, dtype: torch.dtype, device: torch.device
) -> None:
    digests, stops, counts = (t.to(device) for t in tables(nodes, heads, dim, outliers, dtype))
    query = torch.randn(len(nodes), heads * group, dim).to(dtype).to(device)
    wanted = node_scores.definition(query, digests, stops, counts, scale=0.3, reach=2.0)
    found, parts = node_scores.launch(query, digests, stops, counts, scale=0.3, reach=2.0)
    for b, n in enumerate(nodes):
        torch.testing.assert_close(found[b, ..., :n], wanted[b, ..., :n], rtol=1e-4, atol=1e-4)
        for block in range(-(-n // BLOCK) if group > 1 else 0):
            part = slice(block * BLOCK, min(n, (block + 1) * BLOCK))
            sizes = stops[b, :, part.start + 1 : part.stop + 1] - stops[b, :, part]
            own = torch.logsumexp(wanted[b, :, :, part] + sizes.log()[:, None], dim=2)
            top, total = parts[b, :, block, 0, :group], parts[b, :, block, 1, :group]
            torch.testing.assert_close(top + total.log(), own, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_begin_as_well_aligned_as_the_first(dtype: torch.dtype) -> None:
    for dim in (64, 80, 96, 128, 192, 256):
        assert node_digests.row_width(dim, 2) * dtype.itemsize % 16 == 0
