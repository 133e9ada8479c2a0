"""Parents of keys: the definition against distances in float64, the kernel against the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw_baselines.kernels import nearest

CASES = [
    (1, 1, 1, 64, torch.float32),
    (2, 300, 70, 96, torch.bfloat16),
    (1, 65, 16, 128, torch.float16),
    (3, 20, 5, 256, torch.float32),
]


def made(problems: int, tokens: int, count: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys of very different lengths, and promoted ones among them."""
    keys = torch.randn(problems, tokens, dim) * torch.rand(problems, tokens, 1)
    promoted = torch.stack([torch.randperm(tokens)[:count].sort().values for _ in range(problems)])
    return keys.to(dtype), promoted


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_parent_is_the_nearest_in_the_space_of_the_paper(case: tuple[int, int, int, int, torch.dtype]) -> None:
    keys, promoted = made(*case)
    for own, among, found in zip(keys.double(), promoted, nearest.definition(keys, promoted), strict=True):
        c = 1.25**0.5 * own.norm(dim=1).max()
        lifted = torch.cat((own / c, (1 - (own.norm(dim=1, keepdim=True) / c).square()).clamp(min=0).sqrt()), dim=1)
        apart = torch.cdist(lifted, lifted[among], compute_mode="donot_use_mm_for_euclid_dist")
        torch.testing.assert_close(apart.gather(1, found[:, None])[:, 0], apart.amin(dim=1), rtol=1e-4, atol=1e-4)
        assert torch.equal(found[among], torch.arange(len(among))), "a promoted key is nearest to itself"


@pytest.mark.skipif(not HAS_TRITON, reason="no Triton")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_is_the_definition(case: tuple[int, int, int, int, torch.dtype], device: torch.device) -> None:
    keys, promoted = (t.to(device) for t in made(*case))
    found, wanted = nearest.launch(keys, promoted), nearest.definition(keys, promoted)
    assert (found == wanted).float().mean() > 0.99, "but for keys as near to two"
    assert found.dtype == torch.int64


def test_the_last_bit_of_the_longest_key_changes_no_parent() -> None:
    """Two promoted keys that are nearly equally near to a key as long as the longest."""
    keys = torch.zeros(1, 4, 64)
    keys[0, 0, 0] = keys[0, 1, 1] = 1.0
    keys[0, 2, :3] = torch.tensor([0.5, 0.0, 0.86])
    keys[0, 3, 0] = 0.4999
    parent = nearest.definition(keys, torch.tensor([[2, 3]]))[0, 0]
    for nudged in (1 - 2**-23, 1 + 2**-23, 1 + 2**-21):
        keys[0, 1, 1] = nudged
        assert nearest.definition(keys, torch.tensor([[2, 3]]))[0, 0] == parent


@pytest.mark.skipif(not HAS_TRITON, reason="no Triton")
def test_of_equal_ones_the_first(device: torch.device) -> None:
    keys = torch.randn(1, 100, 64, device=device)
    keys[0, 80], keys[0, 90] = keys[0, 70], keys[0, 70]
    promoted = torch.arange(1, 100, device=device)[None]
    for run in (nearest.definition, nearest.launch):
        assert run(keys, promoted)[0, [70, 80, 90]].tolist() == [69, 69, 69]
