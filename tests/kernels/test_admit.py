"""admit against its definition and against Residency, the kernel under the interpreter without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from kvthaw.cache.pool import Residency
from kvthaw.kernels.admit import Placed, admit
from lab.definitions import admit as definition

pytest.importorskip("triton")


@contextmanager
def poisoned() -> Iterator[None]:
    """Whatever torch allocates empty meanwhile holds what no result may."""
    patch, empty, empty_like = pytest.MonkeyPatch(), torch.empty, torch.empty_like

    def fill(made: Tensor) -> Tensor:
        return made.fill_(True if made.dtype == torch.bool else -777)

    def poison(*args: Any, **kwargs: Any) -> Tensor:
        return fill(empty(*args, **kwargs))

    def poison_like(*args: Any, **kwargs: Any) -> Tensor:
        return fill(empty_like(*args, **kwargs))

    with patch.context() as inner:
        inner.setattr(torch, "empty", poison)
        inner.setattr(torch, "empty_like", poison_like)
        yield


class Tables:
    """What admit works on."""

    def __init__(
        self, seqs: int, heads: int, slots: int, rows: int, device: torch.device, dtype: torch.dtype = torch.int32
    ) -> None:
        self.row_slot = torch.full((seqs, heads, rows + 1), -1, dtype=dtype, device=device)
        self.slot_row = torch.full((seqs, heads, slots + 1), -1, dtype=torch.int32, device=device)
        self.used = torch.zeros((seqs, heads, slots + 1), dtype=torch.int32, device=device)
        self.counts = torch.zeros(4, dtype=torch.int64, device=device)

    def all(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.row_slot, self.slot_row, self.used, self.counts

    def same(self, other: Tables) -> None:
        for mine, theirs in zip(self.all()[:3], other.all()[:3], strict=True):
            assert torch.equal(mine[..., :-1], theirs[..., :-1])
        assert torch.equal(self.used[..., -1], other.used[..., -1]), "the number of the step"
        assert torch.equal(self.counts, other.counts)
        assert (self.row_slot[..., -1] == -1).all()
        assert (self.slot_row[..., -1] == -1).all()


def choose(seqs: int, heads: int, count: int, rows: int, device: torch.device, full: float = 1.0, near: int = 0) -> Tensor:
    """Random distinct rows out of [near, rows), -1 after or between them with probability 1 - full."""
    noise = torch.rand(seqs, heads, rows, device=device)
    noise[..., :near] = 2.0
    picked = noise.argsort(dim=-1)[..., :count].int()
    return torch.where(torch.rand(picked.shape, device=device) < full, picked, -1)


def walk(
    seqs: int,
    heads: int,
    count: int,
    slots: int,
    rows: int,
    steps: int,
    device: torch.device,
    full: float,
    *,
    blocks: bool = False,
    dtype: torch.dtype = torch.int32,
) -> None:
    """Both, step after step: equal results, equal tables, and tables that agree with each other."""
    ours, theirs = (Tables(seqs, heads, slots, rows, device, dtype) for _ in range(2))
    wanted = choose(seqs, heads, count, rows, device, full)
    for step in range(steps):
        fresh = choose(seqs, heads, count, rows, device, full)
        keep = torch.rand(wanted.shape, device=device) < 0.7
        mixed = torch.where(keep, wanted, fresh)
        twice = (mixed[..., :, None] == mixed[..., None, :]).tril(-1).any(-1)
        wanted = torch.where(twice, -1, mixed)
        on_host = torch.rand(seqs, -(-rows // 8), device=device) < 0.5
        left = [
            Placed(on_host, 8, torch.full((seqs, heads, slots), -7, dtype=torch.int32, device=device)) if blocks else None
            for _ in range(2)
        ]
        want = definition(wanted, *theirs.all(), left[0])
        with poisoned():
            got = admit(wanted.contiguous(), *ours.all(), left[1])
        if left[0] is not None and left[1] is not None:
            assert torch.equal(left[0].latest[:, :, :count], wanted)
            assert torch.equal(left[0].latest, left[1].latest)
            assert 0 < ours.counts[3] < ours.counts[0]
        for mine, other in zip(got, want, strict=True):
            assert mine.dtype == other.dtype
            assert torch.equal(mine, other), f"step {step}"
        ours.same(theirs)
        assert (ours.used[..., -1] == step + 1).all()
        slots_now, fetch, live = got
        held = (wanted >= 0) & (slots_now >= 0)
        assert blocks or torch.equal(held, wanted >= 0)
        assert torch.equal(ours.row_slot.gather(2, wanted.clamp(min=0).long())[held], slots_now[held])
        assert torch.equal(ours.slot_row.gather(2, slots_now.clamp(min=0).long())[held], wanted[held])
        assert (slots_now[~held] == -1).all()
        assert torch.equal(live.sum(-1), held.sum(-1))
        assert ((fetch == wanted) | (fetch == -1)).all()


@pytest.mark.parametrize("full", [1.0, 0.6])
@pytest.mark.parametrize(
    ("seqs", "heads", "count", "slots", "rows"),
    [(1, 1, 1, 1, 5), (2, 2, 5, 5, 12), (1, 2, 16, 40, 60), (1, 1, 33, 64, 300), (2, 1, 7, 9, 9), (1, 1, 100, 100, 150)],
)
def test_definition(seqs: int, heads: int, count: int, slots: int, rows: int, full: float, device: torch.device) -> None:
    walk(seqs, heads, count, slots, rows, 4, device, full)


def test_slots_in_16_bits(device: torch.device) -> None:
    walk(1, 2, 16, 40, 60, 4, device, 0.6, dtype=torch.int16)


def test_rows_in_blocks_on_the_device_get_no_slot(device: torch.device) -> None:
    walk(2, 2, 40, 40, 200, 4, device, 0.9, blocks=True)


def test_is_what_residency_does(device: torch.device) -> None:
    """Same results and same tables as the class, over steps, clears and padding."""
    residency = Residency(2, 2, 12, device=device)
    ours = Tables(2, 2, 12, 256, device, residency.row_slot.dtype)
    residency.grow(256)
    for step in range(12):
        if step in (4, 9):
            residency.clear(1, 0 if step == 9 else 100)
            for mine, theirs in zip(ours.all()[:3], (residency.row_slot, residency.slot_row, residency.used), strict=True):
                mine.copy_(theirs)
        rows = choose(2, 2, 9, 256, device, 0.9, near=200)
        want = residency.admit(rows)
        with poisoned():
            slots, fetch, live = admit(rows, *ours.all())
        assert torch.equal(slots, want[0])
        assert torch.equal(fetch, want[1])
        place = torch.where(slots >= 0, slots, 12).long()
        marked = torch.zeros(2, 2, 13, dtype=torch.bool, device=device).scatter_(2, place, True)[..., :12]
        assert torch.equal(live, marked)
        assert torch.equal(ours.slot_row, residency.slot_row)
        assert torch.equal(ours.row_slot, residency.row_slot)
        assert torch.equal(ours.used, residency.used)
        assert torch.equal(ours.counts, residency.counts)


def test_nothing_wanted(device: torch.device) -> None:
    tables = Tables(1, 2, 4, 8, device)
    slots, fetch, live = admit(torch.full((1, 2, 4), -1, dtype=torch.int32, device=device), *tables.all())
    assert (slots == -1).all()
    assert (fetch == -1).all()
    assert not live.any()
    assert (tables.slot_row == -1).all()
    assert not tables.counts.any()


def test_many_ages(device: torch.device) -> None:
    """Slots all of different ages leave in the order of age."""
    ours, theirs = Tables(1, 1, 8, 40, device), Tables(1, 1, 8, 40, device)
    for tables in (ours, theirs):
        tables.used[0, 0, :8] = torch.tensor([3, 9, 1, 7, 2, 8, 6, 5], device=device)
        tables.slot_row[0, 0, :8] = torch.arange(8, device=device)
        tables.row_slot[0, 0, :8] = torch.arange(8, device=device)
        tables.used[..., -1] = 9
    rows = torch.tensor([[[30, 2, 31, -1, 32]]], dtype=torch.int32, device=device)
    slots, fetch, _ = admit(rows, *ours.all())
    want = definition(rows, *theirs.all())
    assert torch.equal(slots, want[0])
    assert slots[0, 0].tolist() == [4, 2, 0, -1, 7]
    assert fetch[0, 0].tolist() == [30, -1, 31, -1, 32]
    ours.same(theirs)


def test_rows_twice_do_not_hang(device: torch.device) -> None:
    """The contract forbids it; the device must survive it."""
    tables = Tables(1, 1, 2, 8, device)
    admit(torch.tensor([[[3, 3]]], dtype=torch.int32, device=device), *tables.all())
    for _ in range(3):
        admit(torch.tensor([[[3, 5]]], dtype=torch.int32, device=device), *tables.all())


def test_refuses_more_rows_than_slots(device: torch.device) -> None:
    with pytest.raises(AssertionError, match="do not fit"):
        admit(torch.zeros(1, 1, 3, dtype=torch.int32, device=device), *Tables(1, 1, 2, 8, device).all())


@pytest.mark.gpu
@pytest.mark.parametrize("full", [1.0, 0.8])
@pytest.mark.parametrize(("count", "slots"), [(100, 100), (100, 256), (1024, 1024), (1000, 2048), (2048, 2048), (512, 700)])
@pytest.mark.parametrize("seqs", [1, 4])
def test_gpu(seqs: int, count: int, slots: int, full: float, device: torch.device) -> None:
    walk(seqs, 8, count, slots, 8192, 40, device, full)
    walk(seqs, 8, count, slots, 8192, 8, device, full, blocks=True)


@pytest.mark.gpu
def test_gpu_captured(device: torch.device) -> None:
    """Replays go on from the tables as they are; the step is counted on the device."""
    ours, theirs = Tables(2, 8, 300, 4096, device), Tables(2, 8, 300, 4096, device)
    rows = choose(2, 8, 200, 4096, device)
    admit(rows, *Tables(2, 8, 300, 4096, device).all())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = admit(rows, *ours.all())
    for _ in range(10):
        rows.copy_(choose(2, 8, 200, 600, device, 0.9))
        graph.replay()
        want = definition(rows, *theirs.all())
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        ours.same(theirs)
