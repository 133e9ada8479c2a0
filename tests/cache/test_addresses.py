"""The table of block addresses follows its store."""

from __future__ import annotations

import pytest
import torch

from kvthaw.cache import host as module
from kvthaw.cache.host import Addresses, write


class Blocks:
    """A store of blocks of 4 tokens at made-up places."""

    def __init__(self, *rows: list[tuple[int, bool]]) -> None:
        self.rows, self.seqs, self.block_size, self.version = list(rows), len(rows), 4, 0

    def places(self, seq: int) -> list[tuple[int, bool]]:
        return self.rows[seq]

    def touched(self) -> set[int]:
        return set(range(self.seqs))


def test_blocks_that_a_sequence_no_longer_has_are_nowhere() -> None:
    store, addresses = Blocks([(16, False), (32, True)], [(64, True)]), Addresses()
    table = addresses.follow(store, torch.device("cpu"))
    assert table[:, :3].tolist() == [[16, 32, 0], [64, 0, 0]]
    assert addresses.some_on_host
    store.rows, store.version = [[(16, False)], [(80, False), (96, False)]], 1
    assert addresses.follow(store, torch.device("cpu")) is table
    assert table[:, :3].tolist() == [[16, 0, 0], [80, 96, 0]]
    assert not addresses.on_host.any()
    assert not addresses.some_on_host


def test_tables_of_several_stores_follow_by_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    stores, tables, sent, cpu = (
        [Blocks([(16 + i, i == 1)], []) for i in range(3)],
        [Addresses() for _ in range(3)],
        [],
        torch.device("cpu"),
    )

    def upload(numbers: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        sent.append(numbers)
        return torch.tensor(numbers, dtype=dtype, device=device)

    monkeypatch.setattr(module, "upload", upload)
    write((own.changes(store, cpu) for store, own in zip(stores, tables, strict=True)), cpu)
    assert sent == [[16, 17, 1, 18]]
    assert [own.follow(store, cpu)[0, 0].item() for store, own in zip(stores, tables, strict=True)] == [16, 17, 18]
    assert [own.on_host[0, 0].item() for own in tables] == [False, True, False]
    assert len(sent) == 1
