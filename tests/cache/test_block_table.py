"""The table of blocks: its tensors follow the lists."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvthaw.cache import host
from kvthaw.cache.host import BlockTable, follow
from kvthaw.cache.step import Moves

CPU = torch.device("cpu")


def blocks(*places: tuple[int, bool]) -> Any:
    """Blocks at made-up addresses, on the host or not."""
    return [SimpleNamespace(place=place, on_device=not place[1]) for place in places]


def table_of(*rows: Any) -> BlockTable:
    table = BlockTable(len(rows), 4)
    table.blocks = list(rows)
    table.changed(*range(len(rows)))
    return table


def test_blocks_that_a_sequence_no_longer_has_are_nowhere() -> None:
    table = table_of(blocks((16, False), (32, True)), blocks((64, True)))
    addresses = table.on(CPU)
    assert addresses[:, :3].tolist() == [[16, 32, 0], [64, 0, 0]]
    assert table.some_on_host
    table.blocks = [blocks((16, False)), blocks((80, False), (96, False))]
    table.changed(0, 1)
    assert table.on(CPU) is addresses
    assert addresses[:, :3].tolist() == [[16, 0, 0], [80, 96, 0]]
    assert not table.on_host.any()
    assert not table.some_on_host


def test_tables_follow_by_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    tables, sent = [table_of(blocks((16 + i, i == 1)), blocks()) for i in range(3)], []

    def upload(numbers: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        sent.append(numbers)
        return torch.tensor(numbers, dtype=dtype, device=device)

    monkeypatch.setattr(host, "upload", upload)
    follow(tables, CPU)
    assert sent == [[16, 17, 1, 18]]
    assert [own.on(CPU)[0, 0].item() for own in tables] == [16, 17, 18]
    assert [own.on_host[0, 0].item() for own in tables] == [False, True, False]
    assert len(sent) == 1


def test_a_copy_that_failed_is_repeated_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [table_of(blocks((16, True), (32, False)), blocks((48, True))) for _ in range(2)]
    follow(tables, CPU)
    for table in tables:
        table.blocks[0] = blocks((64, True))
        table.changed(0)
    with monkeypatch.context() as patch:
        patch.setattr(host, "upload", lambda *_: torch.empty(-1))
        with pytest.raises(RuntimeError):
            follow(tables, CPU)
    for addresses, table in zip(follow(tables, CPU), tables, strict=True):
        assert addresses[:, :3].tolist() == [[64, 0, 0], [48, 0, 0]]
        assert table.on_host[:, :3].tolist() == [[True, False, False], [True, False, False]]


def test_a_sequence_without_blocks_is_not_written_until_it_has_some() -> None:
    table = table_of(blocks((16, False), (32, True)), blocks((64, True)))
    table.on(CPU)
    table.blocks[0] = blocks()
    table.changed(0)
    assert table.behind
    assert not table.lacks({0})
    assert table.lacks({1})
    assert table.changes(CPU) == []
    table.blocks[0] = blocks((80, False))
    table.changed(0)
    assert table.on(CPU)[0, :3].tolist() == [80, 0, 0]
    assert table.on_host[:, :2].tolist() == [[False, False], [True, False]]


@pytest.mark.parametrize("behind", [False, True])
def test_moved_sequences_are_where_they_went(behind: bool) -> None:
    """The device moves what it has; what it lacks is written there later."""
    table = table_of(blocks(), blocks((16, False), (32, True)), blocks((48, False)), blocks((64, False), (80, False)))
    table.on(CPU)
    table.blocks[3] = blocks()
    table.changed(3)
    if behind:
        table.blocks[2] = blocks((96, False))
        table.changed(2)
    at, moves = table.blocks[2][0].place[0], Moves({1: 0, 2: 3})
    table.copy_slots(moves)
    table.move(moves)
    if not behind:
        assert table.addresses[[0, 3], :2].tolist() == [[16, 32], [48, 0]]
        assert not table.lacks(set())
    assert table.on(CPU)[[0, 3], :2].tolist() == [[16, 32], [at, 0]]
    assert table.on_host[[0, 3], :2].tolist() == [[False, True], [False, False]]
    assert table.some_on_host
    assert list(map(len, table.blocks)) == [2, 0, 0, 1]
    table.blocks[1] = blocks((16, False))
    table.changed(1)
    assert table.on(CPU)[[0, 1, 3], :2].tolist() == [[16, 32], [16, 0], [at, 0]]
    assert not table.on_host[1].any()


@pytest.mark.parametrize("hosted", [False, True])
def test_a_slot_is_on_the_host_as_its_new_sequence_is(hosted: bool) -> None:
    """Whatever its former sequence was, which the device has not forgotten."""
    table = table_of(blocks((16, not hosted)), blocks((32, hosted)))
    table.on(CPU)
    table.blocks[0] = blocks()
    table.changed(0)
    moves = Moves({1: 0})
    table.copy_slots(moves)
    table.move(moves)
    assert table.some_on_host == hosted
    assert table.on(CPU)[0, 0] == 32
    assert table.on_host[0, 0] == hosted
    table.blocks[0] = blocks()
    table.changed(0)
    table.on(CPU)
    assert not table.some_on_host


def test_sequences_move_to_empty_slots_alone() -> None:
    table = table_of(blocks((16, False)), blocks((32, False)))
    with pytest.raises(ValueError, match=r"slots \[0\] hold blocks"):
        table.move(Moves({1: 0}))
    assert list(map(len, table.blocks)) == [1, 1]
