"""Hits of hash tables: the definition token by token, the kernel against the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw_baselines.kernels import code_hits

CASES = [(1, 1, 1, 1, 2), (2, 2, 2, 63, 150), (1, 3, 4, 130, 64), (3, 1, 8, 20, 7)]
"""Sequences, heads, queries, tokens, tables."""


def made(seqs: int, heads: int, queries: int, tokens: int, tables: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes that meet often, the first part of a longer table, of which not all counts."""
    codes = torch.randint(0, 3, (seqs, heads, tokens + 5, tables), dtype=torch.int16)
    asked = torch.randint(0, 3, (seqs, heads, queries, tables), dtype=torch.int16)
    return codes[:, :, :tokens], asked, torch.tensor([max(1, tokens - 9 * seq) for seq in range(seqs)])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_hit_is_an_equal_code_of_a_token_that_counts(case: tuple[int, int, int, int, int]) -> None:
    codes, asked, known = made(*case)
    found = code_hits.definition(codes, asked, known)
    assert found.dtype == torch.int16
    for b, h, p, t in torch.cartesian_prod(*(torch.arange(n) for n in found.shape)).tolist():
        both = zip(codes[b, h, t].tolist(), asked[b, h, p].tolist(), strict=True)
        assert found[b, h, p, t] == (sum(x == y for x, y in both) if t < known[b] else 0)


@pytest.mark.skipif(not HAS_TRITON, reason="no Triton")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_is_the_definition(case: tuple[int, int, int, int, int], device: torch.device) -> None:
    codes, asked, known = (t.to(device) for t in made(*case))
    assert torch.equal(code_hits.launch(codes, asked, known), code_hits.definition(codes, asked, known))


@pytest.mark.skipif(not HAS_TRITON, reason="no Triton")
def test_layout_is_checked(device: torch.device) -> None:
    codes, asked, known = (t.to(device) for t in made(2, 2, 2, 20, 16))
    for bad in ((codes.int(), asked, known), (codes, asked, known.int()), (codes.transpose(0, 1), asked, known)):
        with pytest.raises(AssertionError):
            code_hits.launch(*bad)
