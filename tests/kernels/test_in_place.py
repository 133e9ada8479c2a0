"""Attention that reads selected rows in their blocks, the kernel under the interpreter without a GPU, against its definition."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvthaw.config import KvDtype
from kvthaw.kernels import flash_decode as module
from kvthaw.kernels.decode_step import DecodeStep, InSlab
from kvthaw.kernels.flash_decode import definition as attention
from kvthaw.kernels.flash_decode import flash_decode
from kvthaw.kernels.in_place import Every, InPlace, Selected
from kvthaw.kernels.row_format import row_format
from kvthaw.kernels.sparse_decode import sparse_decode
from kvthaw.kernels.split import Split
from kvthaw.regions import Regions
from lab.definitions import in_place as definition
from shapes import DTYPES, TOLERANCE

pytest.importorskip("triton")


REGIONS = Regions(2, 6, 4)


@dataclass
class Case:
    """Sequences whose selected rows lie in blocks and in slots, NaN wherever a step must not read: in rows that were not selected,
    in free slots and, a block being half written, behind a sequence's end."""

    lengths: tuple[int, ...] = (90, 3, 0, 33)
    regions: Regions = REGIONS
    heads: int = 2
    group: int = 2
    dim: int = 64
    rows: int = 20
    slots: int = 24
    block_size: int = 8
    dtype: torch.dtype = torch.float32
    kv_dtype: KvDtype | None = None

    def make(self, device: torch.device, *, pooled: bool) -> tuple[DecodeStep, InPlace, Selected, list[list[Tensor]]]:
        """A step, its places and their rows, and the blocks whose addresses the table has. Of pooled rows some have slots."""
        batch, size, of = len(self.lengths), self.block_size, self.regions
        format = row_format(self.kv_dtype, self.dim, self.dtype)
        starts = [of.indexed(of.sink, n) for n in self.lengths]
        slab = torch.full((batch, self.heads, of.held + self.slots, 2, self.dim), torch.nan)
        rows = torch.full((batch, self.heads, self.rows), -1, dtype=torch.int32)
        slots = torch.full_like(rows, -1)
        blocks: list[list[Tensor]] = []
        for b, (start, length) in enumerate(zip(starts, self.lengths, strict=True)):
            for position in {*range(min(of.sink, length - 1)), *range(start, length - 1)}:
                place = position if position < of.sink else of.sink + (position - of.sink) % of.ring
                slab[b, :, place] = torch.randn(self.heads, 2, self.dim)
            mine = torch.full((self.heads, -(-length // size) * size, 2, self.dim), torch.nan)
            for h in range(self.heads):
                found = of.sink + torch.randperm(max(0, start - of.sink))[: self.rows - 3]
                where = torch.randperm(self.rows)[: len(found)]
                rows[b, h, where] = found.int()
                some = torch.rand(len(found)) < (0.5 if pooled else 0.0)
                slots[b, h, where[some]] = torch.randperm(self.slots)[: int(some.sum())].int()
                slab[b, h, of.held + slots[b, h, where[some]].long()] = torch.randn(int(some.sum()), 2, self.dim)
                mine[h, found[~some]] = torch.randn(int((~some).sum()), 2, self.dim)
            stored = format.encode(mine.to(self.dtype))
            blocks.append([part.contiguous().to(device) for part in stored.split(size, dim=1)])
        table = torch.zeros((batch, 20), dtype=torch.int64)
        for b, own in enumerate(blocks):
            table[b, : len(own)] = torch.tensor([block.data_ptr() for block in own])
        keys, values = slab.to(device, self.dtype).unbind(3)
        tally = None if pooled else ((rows >= 0).sum(dim=2).int().to(device), torch.zeros(4, dtype=torch.int64, device=device))
        selected = Selected(rows.to(device), slots.to(device) if pooled else None, table.to(device), size, tally, format)
        query, new = (
            torch.randn(n, batch, h, self.dim).to(device, self.dtype)
            for n, h in ((1, self.heads * self.group), (2, self.heads))
        )
        lengths, first = (torch.tensor(n, dtype=torch.int32, device=device) for n in (self.lengths, starts))
        places = InPlace(of, lengths, first, (new[0], new[1]), selected)
        return DecodeStep(query[0], keys, values, scale=self.dim**-0.5), places, selected, blocks


def expected(step: DecodeStep, of: InPlace, selected: Selected, blocks: list[list[Tensor]]) -> Tensor:
    """The same attention over copies of the rows."""
    keys, values = definition(selected, blocks, step.keys, step.values, of.regions.held)
    copied = InSlab(of.regions, of.lengths, of.starts, of.newest, selected.rows >= 0)
    return attention(replace(step, keys=keys, values=values), copied).out


def compare(
    step: DecodeStep, places: InPlace, selected: Selected, blocks: list[list[Tensor]], attend: Any = flash_decode
) -> None:
    want, found = expected(step, places, selected, blocks), attend(step, places)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found.float(), want, **TOLERANCE[step.keys.dtype])


@pytest.mark.parametrize(
    ("pooled", "splits", "kv_dtype"),
    [*((pooled, splits, None) for pooled in (False, True) for splits in (None, 1, 3)), (True, None, "fp8"), (False, 3, "fp8")],
)
def test_against_the_definition(
    pooled: bool, splits: int | None, kv_dtype: KvDtype | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one block of keys a program, and with several."""
    if splits:
        monkeypatch.setattr(module, "split_for", lambda *_: Split(16, splits, 4, 2))
    compare(*Case(kv_dtype=kv_dtype).make(device, pooled=pooled))


@pytest.mark.parametrize(
    ("dim", "group", "dtype", "kv_dtype", "pooled"),
    [
        (80, 1, torch.bfloat16, None, True),
        (128, 8, torch.float16, None, True),
        (96, 4, torch.float32, None, True),
        (80, 4, torch.bfloat16, "fp8", False),
        (6, 1, torch.float16, "fp8", True),
        (16, 1, torch.float16, "fp8", False),
    ],
    ids=str,
)
def test_shapes(dim: int, group: int, dtype: torch.dtype, kv_dtype: KvDtype | None, pooled: bool, device: torch.device) -> None:
    case = Case(lengths=(50,), dim=dim, group=group, dtype=dtype, kv_dtype=kv_dtype)
    compare(*case.make(device, pooled=pooled))


@pytest.mark.parametrize(
    ("splits", "each", "kv_dtype"),
    [(None, 0, None), (1, 0, None), (3, 0, None), (3, 0, "fp8"), (3, 20, None), (5, 16, "fp8"), (2, 1000, None)],
)
def test_all_rows_between_sink_and_ring(
    splits: int | None, each: int, kv_dtype: KvDtype | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if they were listed, however many more a step has places for; of blocks of which the others' rows are NaN."""
    if splits:
        monkeypatch.setattr(module, "split_for", lambda *_: Split(16, splits, 4, 2, each))
    step, places, selected, blocks = Case(rows=70, kv_dtype=kv_dtype).make(device, pooled=False)
    size, format = selected.block_size, selected.format
    for b, start in enumerate(places.starts.tolist()):
        for position in range(places.regions.sink, start):
            for block in blocks[b][position // size : position // size + 1]:
                new = torch.randn(block.shape[0], 2, step.query.shape[2]).to(device, step.keys.dtype)
                block[:, position % size] = format.encode(new) if format else new
    every = replace(places, selected=Every(100, selected.table, size, format))
    compare(step, every, every.listed(step.keys.shape[1]), blocks)


def test_softcap_weights_and_sinks(device: torch.device) -> None:
    case = Case()
    step, *of = case.make(device, pooled=True)
    weight = torch.randn(4, 4, case.regions.held + case.rows, device=device)
    weight[:, 1, case.regions.held :: 3] = -torch.inf
    compare(replace(step, softcap=5.0, log_weight=weight, sinks=torch.randn(4, device=device)), *of)


def test_rows_are_counted_where_nothing_else_counts_them(device: torch.device) -> None:
    step, places, selected, blocks = Case().make(device, pooled=False)
    assert selected.tally is not None
    counts, totals = selected.tally
    for _ in range(2):
        compare(step, places, selected, blocks)
    total = int(counts.sum())
    assert totals.tolist() == [2 * total, 0, int(counts.max()), 2 * total]


@pytest.mark.parametrize("pooled", [False, True])
def test_on_a_cpu_without_a_kernel(pooled: bool) -> None:
    step, places, selected, blocks = Case().make(torch.device("cpu"), pooled=pooled)
    free = replace(step, keys=step.keys.nan_to_num(), values=step.values.nan_to_num())  # torch reads what it does not see
    compare(free, places, selected, blocks, sparse_decode)
    if selected.tally is not None:
        counts, totals = selected.tally
        assert totals.tolist() == [int(counts.sum()), 0, int(counts.max()), int(counts.sum())]


@pytest.mark.parametrize("broken", ["rows", "slots", "table", "values"])
def test_layout_is_checked(broken: str, device: torch.device) -> None:
    step, places, selected, _ = Case().make(device, pooled=True)
    assert selected.slots is not None
    wrong = {
        "rows": replace(selected, rows=selected.rows.long()),
        "slots": replace(selected, slots=selected.slots[:, :, ::2]),
        "table": replace(selected, table=selected.table.int()),
        "values": selected,
    }
    apart = replace(step, values=step.values.clone()) if broken == "values" else step
    with pytest.raises(AssertionError):
        flash_decode(apart, replace(places, selected=wrong[broken]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("kv_dtype", [None, "fp8"], ids=str)
@pytest.mark.parametrize("pooled", [False, True])
def test_gpu(pooled: bool, kv_dtype: KvDtype | None, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    for lengths, rows, regions in (
        ((9000,) * 3, 100, Regions(128, 256, 512)),
        ((9000, 400, 0, 3000) * 6, 788, Regions(16, 100, 64)),
    ):
        case = Case(lengths, regions, 8, 4, dim, rows, slots=rows, block_size=512, dtype=dtype, kv_dtype=kv_dtype)
        compare(*case.make(device, pooled=pooled))
