"""Digests of nodes: the definition against a slow one in float64, the kernel against the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw_baselines.kernels import node_digests

CASES = [  # sizes of the nodes, problems, dim, outliers, mapped, dtype
    ([1], 1, 64, 2, True, torch.float32),
    ([3, 0, 40, 2, 70, 1, 9], 2, 96, 2, True, torch.bfloat16),
    ([5, 33, 0], 2, 128, 5, True, torch.float32),
    ([10, 10, 10, 4], 3, 64, 2, False, torch.float16),
    ([8, 8, 3], 1, 80, 0, False, torch.float32),
    ([4, 7], 1, 256, 1, True, torch.bfloat16),
]
over = pytest.mark.parametrize(("sizes", "problems", "dim", "outliers", "mapped", "dtype"), CASES)


def made(sizes: list[int], problems: int, dim: int, mapped: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """keys, order and stops; the sizes come in another order in each problem, and keys in clumps, so that outliers are clear."""
    g = torch.Generator().manual_seed(dim)
    keys = torch.randn(problems, sum(sizes), dim, generator=g) * (1 + torch.rand(problems, sum(sizes), 1, generator=g))
    rolled = [torch.tensor(sizes).roll(n) if mapped else torch.tensor(sizes) for n in range(problems)]
    stops = torch.nn.functional.pad(torch.stack(rolled).cumsum(dim=1), (1, 0)).int()
    orders = [torch.randperm(sum(sizes), generator=g) for _ in range(problems)]
    order = torch.stack(orders) if mapped else torch.arange(sum(sizes)).expand(problems, -1)
    return keys.to(dtype), order.int() if mapped else order[:1].int().expand(problems, -1), stops


def slow(keys: Tensor, outliers: int) -> tuple[Tensor, list[int]]:
    """The digest of keys [n, D] float64, and which of them are outliers."""
    mean = keys.mean(dim=0)
    around, chosen = [mean], list[int]()
    for _ in range(outliers):
        apart = [min(float((key - p).square().sum()) for p in around) for key in keys]
        chosen.append(next(i for i, own in enumerate(apart) if own * (1 + 1e-4) >= max(apart)))
        around.append(keys[chosen[-1]])
    spread = (keys - mean).square().sum(dim=1).mean().div(keys.shape[1]).sqrt()
    return torch.cat((*around, spread[None])), chosen


@over
def test_digests_are_mean_outliers_and_spread(
    sizes: list[int], problems: int, dim: int, outliers: int, mapped: bool, dtype: torch.dtype, device: torch.device
) -> None:
    keys, order, stops = made(sizes, problems, dim, mapped, dtype)
    digests, moved = (t.cpu() for t in node_digests.definition(keys.to(device), order.to(device), stops.to(device), outliers))
    assert digests.shape == (problems, len(sizes), node_digests.row_width(dim, outliers))
    assert digests.dtype == dtype
    for n in range(problems):
        for c, (a, b) in enumerate(zip(stops[n].tolist(), stops[n, 1:].tolist(), strict=False)):
            if a == b:
                continue
            own = order[n, a:b].tolist()
            wanted, chosen = slow(keys[n, own].double(), outliers)
            near = 2 * torch.finfo(dtype).eps
            torch.testing.assert_close(digests[n, c, : len(wanted)].double(), wanted, rtol=near, atol=near)
            first = [own[i] for i in sorted(set(chosen))]
            assert moved[n, a:b].tolist() == first + [i for i in own if i not in first]


@pytest.mark.skipif(not HAS_TRITON, reason="no Triton")
@over
def test_the_kernel_is_the_definition(
    sizes: list[int], problems: int, dim: int, outliers: int, mapped: bool, dtype: torch.dtype, device: torch.device
) -> None:
    keys, order, stops = made(sizes, problems, dim, mapped, dtype)
    on = keys.to(device), order.to(device), stops.to(device)
    wanted, wanted_order = node_digests.definition(*on, outliers)
    found, moved = node_digests.launch(*on, outliers)
    assert torch.equal(moved, wanted_order)
    filled = on[2].diff(dim=1) > 0
    near = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(found[filled], wanted[filled], rtol=near, atol=near)
