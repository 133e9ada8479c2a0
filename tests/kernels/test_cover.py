"""How well keys are covered, against the plain definition."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels import cover as op

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
SHAPES = [(1, 1, 1, 64), (2, 63, 4, 64), (2, 140, 70, 96), (1, 150, 63, 128), (1, 40, 17, 256), (2, 130, 5, 8)]
CASES = list(zip(SHAPES, itertools.cycle(CLOSE), strict=False))
PATHS = [op.definition, pytest.param(op.launch, marks=pytest.mark.skipif(not HAS_TRITON, reason="no Triton"))]


def wanted(keys: Tensor, centres: Tensor) -> Tensor:
    """The largest cosine with a centre, in float64; 1 for keys that are 0."""
    lengths = keys.double().norm(dim=2, keepdim=True)
    unit = torch.where(lengths > 0, keys.double() / lengths, 0.0)
    chosen = unit.gather(1, centres[:, :, None].expand(-1, -1, keys.shape[2]))
    return torch.where(lengths[..., 0] > 0, (unit @ chosen.transpose(1, 2)).amax(dim=2), 1.0)


def some(problems: int, tokens: int, count: int, dim: int) -> tuple[Tensor, Tensor]:
    """Keys of very different lengths in all directions, and centres, the last of them twice."""
    keys = torch.randn(problems, tokens, dim) * torch.logspace(-2, 2, tokens)[torch.randperm(tokens), None]
    centres = torch.stack([torch.randperm(tokens)[:count] for _ in range(problems)])
    return keys, torch.cat((centres, centres[:, -1:]), dim=1)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_the_largest_cosine_with_a_centre(
    shape: tuple[int, int, int, int], dtype: torch.dtype, path: Callable[[Tensor, Tensor, Tensor], None], device: torch.device
) -> None:
    keys, centres = some(*shape)
    keys, centres = keys.to(device, dtype), centres.to(device)
    keys[:, 3:5] = 0  # no direction to cover
    want, found = wanted(keys, centres).float(), torch.full(shape[:2], -torch.inf, device=device)
    want[:, ::7], found[:, ::7] = want[:, ::7].clamp(min=0.3), 0.3  # what earlier centres did stays where it is more
    path(found, keys, centres)
    torch.testing.assert_close(found, want, rtol=0, atol=CLOSE[dtype])
    assert (found[:, ::7] >= 0.3).all()
    assert (found[:, 3:5] == 1).all()


@pytest.mark.skipif(not HAS_TRITON, reason="no Triton")
@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_directions_are_keys_of_length_one(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    keys, which = some(*shape)
    keys, which = keys.to(device, dtype), which.to(device)
    keys[:, 3:5] = 0
    taken = keys.gather(1, which[:, :, None].expand(-1, -1, shape[3])).double()
    want = torch.nn.functional.normalize(taken, dim=2)
    for found in (op.launch_directions(keys, which, torch.float32), op.directions(keys, which)):
        torch.testing.assert_close(found.double(), want, rtol=0, atol=1e-6)
    torch.testing.assert_close(op.launch_directions(keys, which, dtype), want.to(dtype), rtol=0, atol=CLOSE[dtype])


@pytest.mark.parametrize("path", PATHS)
def test_centres_of_several_rounds_are_as_those_of_one(
    path: Callable[[Tensor, Tensor, Tensor], None], device: torch.device
) -> None:
    keys, centres = some(2, 150, 20, 64)
    keys, centres = keys.to(device), centres.to(device)
    once, rounds = (torch.full((2, 150), -torch.inf, device=device) for _ in range(2))
    path(once, keys, centres)
    for part in centres.split(6, dim=1):
        path(rounds, keys, part)
    torch.testing.assert_close(rounds, once, rtol=0, atol=1e-6)
    assert (once.gather(1, centres) > 1 - 1e-5).all()


@pytest.mark.skipif(not HAS_TRITON, reason="no Triton")
def test_nothing_beside_keys_and_centres_is_read_or_written(device: torch.device) -> None:
    """Keys are a view between keys that are NaN, results one between numbers that must stay."""
    keys, centres = some(3, 100, 9, 24)
    around = torch.full((5, 100, 24), torch.nan, device=device)
    around[1:4] = keys.to(device)
    results = torch.full((5, 100), -torch.inf, device=device)
    op.launch(results[1:4], around[1:4], centres.to(device))
    assert torch.isfinite(results[1:4]).all()
    assert (results[[0, 4]] == -torch.inf).all()
    torch.testing.assert_close(results[1:4].double().cpu(), wanted(keys, centres), rtol=0, atol=1e-5)


def test_blocks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, centres = some(2, 100, 5, 64)
    whole, parts = (torch.full((2, 100), -torch.inf) for _ in range(2))
    op.definition(whole, keys, centres)
    monkeypatch.setattr(op, "SCORES", 64)
    op.definition(parts, keys, centres)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-6)
