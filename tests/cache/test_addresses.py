"""The table of block addresses follows its store."""

from __future__ import annotations

import torch

from kvthaw.cache.addresses import Addresses


class Blocks:
    """A store of blocks of 4 tokens at made-up places."""

    def __init__(self, *rows: list[tuple[int, bool]]) -> None:
        self.rows, self.seqs, self.block_size, self.version = list(rows), len(rows), 4, 0

    def places(self) -> list[list[tuple[int, bool]]]:
        return self.rows


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
