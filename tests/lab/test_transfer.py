"""The transfer benchmark's ways on the CPU: each brings the rows that were asked for, and the check sees one that does not."""

from __future__ import annotations

import pytest
import torch

from kvthaw.errors import CacheError
from lab import kernels_transfer as bench


@pytest.mark.parametrize("order", ["prkv", "scattered"])
def test_every_way_brings_the_rows_asked_for(order: bench.Order, device: torch.device) -> None:
    of = bench.stage(200, 2, order, device, heads=2, dim=16, static=40)
    if order == "prkv":
        assert torch.equal(of.order[:, 40:].sort(dim=1).values, of.order[:, 40:])
    bench.check(of)


def test_the_check_sees_other_rows(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    of = bench.stage(200, 2, "scattered", device, heads=2, dim=16)
    monkeypatch.setattr(bench, "batched", lambda of, layout, want: None)
    with pytest.raises(CacheError, match="batched, NHD brought other rows"):
        bench.check(of)
    of.paged["HND"][0, 0, 0, 0, 0] += 1
    with pytest.raises(CacheError, match="the pages in HND hold other rows"):
        bench.check(of)
