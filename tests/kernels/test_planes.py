"""The query's coarse coordinates and their planes."""

from __future__ import annotations

import pytest
import torch
from paris import SEED, check_bytes, poisoned

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels import planes as op
from kvthaw.kernels.query import rotate_queries
from kvthaw.kernels.srht import make_rotation


def test_coordinates_are_thirds_of_their_spread() -> None:
    values = torch.randn(2, 1, 3, 8, 16) * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]
    values[1, 0, 2] = 0.0
    numbers = op.coarse(values)
    unit = values.flatten(3).double().norm(dim=3)[..., None, None] / 128**0.5 / 3
    want = (values / torch.where(unit > 0, unit, 1.0)).clamp(-8, 7)
    assert ((numbers - want).abs() < 0.501).all()
    assert (int(numbers.min()), int(numbers.max())) == (-8, 7)
    assert not numbers[1, 0, 2].any()


@pytest.mark.parametrize(("heads", "subs"), [(1, 1), (3, 8), (4, 16), (5, 32)])
def test_planes_hold_the_numbers(heads: int, subs: int) -> None:
    numbers = torch.randint(-8, 8, (2, 1, heads, 8, subs), dtype=torch.int32)
    packed = op.pack(numbers)
    assert packed.shape == (2, 1, -(-heads // 4), 2, 8, max(16, subs))
    assert not packed[..., subs:].any()
    found = op.unpack(packed, subs)
    for column in range(found.shape[2]):
        assert torch.equal(found[:, :, column], numbers[:, :, column % heads])
    head, coordinate, b = 0, 5, subs - 1
    bits = [int(packed[1, 0, 0, k // 2, 2 * head + k % 2, b]) >> coordinate & 1 for k in range(4)]
    assert bits[0] + 2 * bits[1] + 4 * bits[2] - 8 * bits[3] == int(numbers[1, 0, head, coordinate, b])


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
@pytest.mark.parametrize(
    ("dim", "group", "mean"),
    [(16, 4, False), (24, 3, False), (256, 2, True), (8, 5, False)],
)
def test_kernel(dim: int, group: int, mean: bool, device: torch.device) -> None:
    rotation = make_rotation(dim, SEED, device=device)
    query = torch.randn(2, group, dim, device=device)
    query[1] = 0.0
    totals = torch.full((2, 1, 128), 99, dtype=torch.int32, device=device)
    with poisoned():
        rotated, planes = op.launch(query, rotation, 1, totals, mean=mean)
    assert not totals.any()
    want = rotate_queries(query.cpu(), 1, make_rotation(dim, SEED), mean=mean)
    torch.testing.assert_close(rotated.values.cpu(), want, atol=5e-6, rtol=1e-5)
    check_bytes(rotated)
    packed = op.pack(op.coarse(want))
    assert planes.shape == packed.shape
    subs = want.shape[4]
    differ = (op.unpack(planes.cpu(), subs) - op.unpack(packed, subs)).abs()
    assert int(differ.max()) <= 1
    assert float(differ.float().mean()) < 0.01  # just about half of a step
    assert not planes[..., subs:].any()
    assert not planes[1].any()
