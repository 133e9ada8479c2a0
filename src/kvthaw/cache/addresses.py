"""Where the blocks of a host store lie, on the device: what a kernel needs that reads rows from the host."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kvthaw.cache.device_lengths import sent


class Blocks(Protocol):
    """A store of blocks: what the table follows."""

    block_size: int
    version: int

    @property
    def seqs(self) -> int:
        """Number of sequences."""

    def places(self) -> list[list[tuple[int, bool]]]:
        """Of each sequence's blocks the address, and whether it is one on the host."""


class Addresses:
    """A table [seqs, blocks] int64 that follows a store, and which of the blocks lie on the host, bool. Both tensors stay where
    they are while there is room; only rows of sequences whose blocks have changed are written. some_on_host: whether any does."""

    def __init__(self) -> None:
        self.table: Tensor | None = None
        self.on_host = torch.empty(0, dtype=torch.bool)
        self.some_on_host, self._version = False, -1
        self._written: list[list[tuple[int, bool]]] = []  # as places()

    def make_room(self, host: Blocks, tokens: int, device: torch.device) -> None:
        """Have room for so many tokens a sequence, in a new table where the one there is too small."""
        self._allocate(host.seqs, max(8, -(-tokens // host.block_size)), device)

    def follow(self, host: Blocks, device: torch.device) -> Tensor:
        """Return the table with the addresses as they are now; written only where the store's have changed. No host sync."""
        if self._version == host.version and self.table is not None:
            return self.table
        places = host.places()
        width = max(map(len, places), default=0)
        if self.table is None or self.table.shape[0] != len(places) or self.table.shape[1] < width:
            self._allocate(len(places), max(8, 2 * width), device)
        for seq, (row, written) in enumerate(zip(places, self._written, strict=True)):
            if row != written:
                self._write(seq, row + [(0, False)] * (len(written) - len(row)))
        self._version, self._written = host.version, places
        self.some_on_host = any(on_host for row in places for _, on_host in row)
        assert self.table is not None
        return self.table

    def _write(self, seq: int, row: list[tuple[int, bool]]) -> None:
        assert self.table is not None
        before = self._written[seq] + [(0, False)] * (len(row) - len(self._written[seq]))
        for mine, column, dtype in ((self.table, 0, torch.int64), (self.on_host, 1, torch.bool)):
            its = [place[column] for place in row]
            if its != [place[column] for place in before]:
                mine[seq, : len(row)].copy_(sent(torch.tensor(its, dtype=dtype), mine.device), non_blocking=True)

    def _allocate(self, seqs: int, width: int, device: torch.device) -> None:
        if self.table is None or self.table.shape[0] != seqs or self.table.shape[1] < width:
            self.table, self._version = torch.zeros((seqs, width), dtype=torch.int64, device=device), -1
            self.on_host, self._written = torch.zeros((seqs, width), dtype=torch.bool, device=device), [[] for _ in range(seqs)]
