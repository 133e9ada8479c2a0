"""The exact index against the softmax it speaks of."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvthaw.cache.host import HostStore
from kvthaw.cache.index_api import IndexContext
from kvthaw.index.exact import ExactIndex
from kvthaw.index.tokens import Policy
from kvthaw.regions import Regions
from shapes import DTYPES

CPU = torch.device("cpu")


def index(
    policy: Policy = "max", *, scale: float = 0.7, dtype: torch.dtype = torch.float32, seqs: int = 2, heads: int = 2
) -> ExactIndex:
    store = HostStore(seqs, heads, 16, dtype)
    return ExactIndex(IndexContext(0, 3 * heads, heads, 16, dtype, CPU, store, Regions(4, 8, 4), scale), policy=policy)


@pytest.mark.parametrize("policy", ["max", "mean", "mean_query"])
@pytest.mark.parametrize("scale", [0.05, 0.7, 3.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rows_of_the_largest_weights(policy: Policy, scale: float, dtype: torch.dtype) -> None:
    """With G query heads the scale decides whose choice counts, so it must be the layer's."""
    made = index(policy, scale=scale, dtype=dtype)
    keys = torch.randn(2, 2, 90, 16).to(dtype)
    for seq, n in enumerate((90, 30)):
        made.build(seq, 4, keys[seq, :, :n], keys[seq, :, :n], torch.empty(6, 0, 16))
    query = torch.randn(2, 6, 16).to(dtype)
    chosen = made.select(query, 12)
    for seq, n in enumerate((90, 30)):
        for head in range(2):
            asked = query[seq, 3 * head : 3 * head + 3].float()
            k = keys[seq, head, :n].float()
            if policy == "mean_query":
                asked = asked.mean(0, keepdim=True)
            weights = torch.softmax(asked @ k.T * scale, dim=1)
            merged = weights.amax(0) if policy == "max" else weights.mean(0)
            rows = chosen.rows[seq, head]
            assert chosen.counts[seq, head] == 12
            least = merged.topk(12).values[-1]
            slack = 1e-5 if dtype == torch.float32 else 2e-2
            assert (merged[rows.long() - 4] >= least * (1 - slack) - 1e-7).all(), "ties may go either way"
            assert len(set(rows.tolist())) == 12


@given(parts=st.lists(st.integers(1, 40), min_size=1, max_size=6), cut=st.integers(0, 100), seed=st.integers(0, 99))
def test_appended_and_truncated_is_built(parts: list[int], cut: int, seed: int) -> None:
    torch.manual_seed(seed)
    total = sum(parts)
    keys = torch.randn(2, total, 16)
    grown, built = index(seqs=1), index(seqs=1)
    grown.build(0, 4, keys[:, : parts[0]], keys[:, : parts[0]], torch.empty(6, 0, 16))
    at = parts[0]
    for n in parts[1:]:
        grown.append([0], keys[None, :, at : at + n], keys[None, :, at : at + n], None)
        at += n
    grown.truncate(0, 4 + cut)
    left = min(cut, total)
    built.build(0, 4, keys[:, :left], keys[:, :left], torch.empty(6, 0, 16))
    query = torch.randn(1, 6, 16)
    one, other = grown.select(query, 10), built.select(query, 10)
    assert torch.equal(one.rows, other.rows)
    assert torch.equal(one.counts, other.counts)


def test_weights_too_small_for_float32_have_a_rank() -> None:
    made = index(seqs=1, heads=1, scale=50.0)
    keys = torch.linspace(0, 10, 30)[None, :, None].expand(1, 30, 16)
    made.build(0, 4, keys, keys, torch.empty(3, 0, 16))
    assert made.select(torch.ones(1, 3, 16), 5).rows[0, 0].tolist() == [33, 32, 31, 30, 29]
