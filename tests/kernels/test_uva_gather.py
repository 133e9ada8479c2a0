"""The kernel that reads rows from host memory, under the interpreter without a GPU, against its definition."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvthaw.cache.host import HostStore
from kvthaw.kernels import uva_gather as op
from kvthaw.kernels.uva_gather import COUNTERS, crossing, uva_gather
from lab.definitions import uva_gather as definition
from shapes import DTYPES, HEAD_DIMS, poisoned

pytest.importorskip("triton")


def store(head_dim: int, dtype: torch.dtype, block_size: int, lengths: list[int], heads: int = 3) -> HostStore:
    made = HostStore(len(lengths), heads, head_dim, dtype, block_size=block_size, pinned=torch.cuda.is_available())
    for seq, length in enumerate(lengths):
        made.append(seq, torch.randn(heads, length, 2, head_dim).to(dtype))
    return made


def wishes(lengths: list[int], heads: int, count: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows to fetch, with holes, and distinct slots for them."""
    fetch = torch.full((len(lengths), heads, count), -1, dtype=torch.int32)
    places = torch.full_like(fetch, -1)
    for b, length in enumerate(lengths):
        for h in range(heads):
            n = min(count, length)
            where = torch.randperm(count)[:n]
            fetch[b, h, where] = torch.randperm(length)[:n].int()
            places[b, h] = torch.randperm(slots)[:count].int()
            fetch[b, h, torch.rand(count) < 0.3] = -1
    return fetch, places


@pytest.mark.parametrize(("head_dim", "dtype"), list(zip([*HEAD_DIMS, 6], itertools.cycle(DTYPES), strict=False)))
def test_against_the_definition(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    lengths, heads, slots, offset = [37, 5, 64], 3, 12, 7
    host = store(head_dim, dtype, 16, lengths)
    fetch, places = wishes(lengths, heads, 9, slots)
    found, expected = (poisoned(3, heads, offset + slots, 2, head_dim, dtype=dtype).to(device) for _ in range(2))
    tables = [list(host.read(seq, 0, length).split(16, dim=1)) for seq, length in enumerate(lengths)]
    definition(tables, 16, expected, fetch, places, offset)
    on_host, counters = torch.rand(host.table.on_cpu().shape) < 0.5, torch.zeros(COUNTERS, dtype=torch.int64, device=device)
    rows = fetch.to(device), places.to(device)
    uva_gather(host.table.on_cpu().to(device), 16, found, *rows, offset, (on_host.to(device), counters))
    assert counters.sum() == crossing(on_host, 16, fetch).sum() > 0
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert expected.isnan().any(), "what was not asked for is left as it was"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_programs_of_many_rows(dtype: torch.dtype, device: torch.device) -> None:
    assert [op.rows_each(rows, op.PROGRAMS) for rows in (1, 16384, 16385, 110592, 374784)] == [1, 1, 2, 8, 16]
    lengths, heads, slots = [37, 5], 3, 12
    host = store(64, dtype, 16, lengths)
    fetch, places = (rows.to(device) for rows in wishes(lengths, heads, 9, slots))
    fetch[0, 1:] = -1
    found = []
    for programs in (1 << 14, 20, 1):  # of one row, of four and of sixteen, 54 in all
        slab, counters = poisoned(2, heads, slots, 2, 64, dtype=dtype).to(device), torch.zeros(COUNTERS, dtype=torch.int64)
        there = torch.ones(host.table.on_cpu().shape, dtype=torch.bool, device=device), counters.to(device)
        uva_gather(host.table.on_cpu().to(device), 16, slab, fetch, places, 0, there, programs=programs)
        assert there[1].sum() == (fetch >= 0).sum()
        found.append(slab)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0, equal_nan=True)


def test_nothing_to_fetch(device: torch.device) -> None:
    host = store(64, torch.float32, 16, [20])
    slab = poisoned(1, 3, 5, 2, 64).to(device)
    nothing = torch.full((1, 3, 4), -1, dtype=torch.int32, device=device)
    uva_gather(host.table.on_cpu().to(device), 16, slab, nothing, nothing, 0)
    assert slab.isnan().all()


def test_layout_is_checked(device: torch.device) -> None:
    host = store(64, torch.float32, 16, [20])
    slab, rows = torch.zeros(1, 3, 5, 2, 64, device=device), torch.zeros(1, 3, 4, dtype=torch.int32, device=device)
    table = host.table.on_cpu().to(device)
    for bad in (
        (table, 16, slab.transpose(1, 2), rows, rows, 0),
        (table, 16, slab, rows.long(), rows, 0),
        (table.int(), 16, slab, rows, rows, 0),
        (table, 16, slab, rows.transpose(1, 2), rows, 0),
    ):
        with pytest.raises(AssertionError):
            uva_gather(*bad)
