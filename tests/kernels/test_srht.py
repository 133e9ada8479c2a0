"""The rotation: orthogonal, the same for a seed, and alike as butterfly and product."""

from __future__ import annotations

import pytest
import torch

from kvthaw.kernels import srht as op
from lab.ablated_codes import identity


def butterfly(x: torch.Tensor, diagonal: torch.Tensor) -> torch.Tensor:
    """H D x / sqrt(d') by the fast Walsh-Hadamard transform, float32. x [..., d]; diagonal [d'] +-1. Returns [..., d']."""
    width = diagonal.shape[0]
    y = torch.nn.functional.pad(x.float(), (0, width - x.shape[-1])) * diagonal.float()
    step = 1
    while step < width:
        pairs = y.reshape(*y.shape[:-1], width // (2 * step), 2, step)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack((a + b, a - b), dim=-2).reshape(y.shape)
        step *= 2
    return y * float(width**-0.5)


@pytest.mark.parametrize("dim", [8, 64, 80, 96, 128, 192, 256])
def test_product_equals_the_butterfly_and_keeps_inner_products(dim: int) -> None:
    rotation = op.make_rotation(dim, 7)
    x = torch.randn(3, 50, dim)
    y = op.srht(x, rotation)
    assert y.shape == (3, 50, op.padded(dim))
    torch.testing.assert_close(y, butterfly(x, op.signs(dim, 7)), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(y @ y.transpose(1, 2), x @ x.transpose(1, 2), atol=1e-4, rtol=1e-4)


def test_a_spike_is_spread_evenly() -> None:
    x = torch.zeros(1, 128)
    x[0, 5] = 3.0
    torch.testing.assert_close(op.srht(x, op.make_rotation(128, 0)).abs(), torch.full((1, 128), 3.0 * 128**-0.5))


def test_seeds_differ_and_repeat_and_the_identity_pads() -> None:
    bases = [op.make_rotation(64, seed).basis for seed in (0, 0, 1)]
    assert torch.equal(bases[0], bases[1])
    assert not torch.equal(bases[0], bases[2])
    x = torch.randn(4, 80)
    plain = op.srht(x, identity(80))
    assert torch.equal(plain[:, :80], x)
    assert not plain[:, 80:].any()
