"""Kernels over the first entries of a table's rows, as steps of short sequences look at them, against the whole table."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvthaw.kernels import HAS_TRITON, collide, planes, signs, unit_select
from kvthaw.kernels.bucket_topk import bucket_topk
from kvthaw.kernels.collide import BINS, CHUNK
from kvthaw.kernels.cut import row_stride
from kvthaw_baselines.kernels import node_digests, node_scores

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="no Triton")
LENGTHS = [100, 2000]


@pytest.mark.parametrize("way", ["signs", "tiers"])
def test_candidates_of_the_first_keys(way: str, device: torch.device) -> None:
    ids = torch.randint(0, 256, (3, 2, 8, 3 * CHUNK), dtype=torch.uint8, device=device)[:2]
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    bits = planes.pack(torch.randint(-8, 8, (2, 2, 2, 8, 8), dtype=torch.int32)).to(device)
    table = torch.randint(0, 6, (2, 2, 1, 8, 256), dtype=torch.int32, device=device)
    found = []
    for some in (ids, ids[..., :CHUNK]):
        totals = torch.zeros((2, 2, BINS), dtype=torch.int32, device=device)
        scores = (
            signs.launch(bits, some, lengths, totals) if way == "signs" else collide.launch(table, some, lengths, totals, 0)
        )
        assert scores.scores.shape[2] == some.shape[3]
        chosen = bucket_topk(scores, lengths, lengths // 2, 1024)[0] if device.type == "cuda" else torch.empty(0)
        known = [scores.scores[i, :, :n].tolist() for i, n in enumerate(LENGTHS)]
        found.append([known, totals.tolist(), [chosen[i, :, : n // 2].tolist() for i, n in enumerate(LENGTHS[: len(chosen)])]])
    assert found[0] == found[1]


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("ordered", [False, True])
def test_units_that_there_are(ordered: bool, heads: int, device: torch.device) -> None:
    """More units than one program chooses among, cut to fewer, and more in a sequence than are looked at."""
    units, dim, counts = 4200, 16, torch.tensor([70, 33], dtype=torch.int32, device=device)
    digests = torch.randn((3, heads, units, dim), device=device)[:2]
    stops = (2 * torch.arange(units + 1, device=device)).int().expand(3, heads, -1).contiguous()[:2]
    order = torch.rand((2, heads, 2 * units), device=device).argsort(dim=2).int() if ordered else None
    query = torch.randn((2, 2 * heads, dim), device=device)
    how: dict[str, Any] = {"first": 0, "budget": 37, "scale": 1.0, "policy": "max"}
    whole = unit_select.launch(query, digests, stops, order, counts, **how)
    cut = unit_select.launch(query, digests[:, :, :80], stops[:, :, :81], order, counts, **how)
    for one, other in zip(whole, cut, strict=True):
        assert torch.equal(one, other)
    few = digests[:, :, :40], stops[:, :, :41], order
    assert torch.equal(
        unit_select.launch(query, *few, counts, **how)[0], unit_select.launch(query, *few, counts.clamp(max=40), **how)[0]
    )


def test_nodes_that_there_are(device: torch.device) -> None:
    dim, counts = 64, torch.tensor([70, 33], dtype=torch.int32, device=device)
    digests = torch.randn((2, 2, 300, node_digests.row_width(dim, 2)), device=device)
    stops = (2 * torch.arange(301, device=device)).int().expand(2, 2, -1).contiguous()
    query = torch.randn((2, 4, dim), device=device)
    whole, parts = node_scores.launch(query, digests, stops, counts, scale=0.3, reach=2.0)
    cut, fewer = node_scores.launch(query, digests[:, :, :80], stops[:, :, :81], counts, scale=0.3, reach=2.0)
    for i, n in enumerate(counts.tolist()):
        assert torch.equal(whole[i, ..., :n], cut[i, ..., :n])
        assert torch.equal(parts[i, :, : -(-n // 64)], fewer[i, :, : -(-n // 64)])


def test_what_is_no_table_is_refused() -> None:
    table = torch.zeros(3, 4, 5, 2)
    assert row_stride(table[:2, :, :3]) == 10
    for other in (table[:, :2], table.transpose(0, 1), table[..., :1]):
        with pytest.raises(AssertionError):
            row_stride(other)
