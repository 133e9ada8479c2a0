"""The block table on the device: addresses of a host store's blocks, for kernels that read rows from the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvthaw.cache.device_lengths import upload


class Blocks(Protocol):
    """A store of blocks that the block table follows."""

    block_size: int
    version: int

    @property
    def seqs(self) -> int:
        """Number of sequences."""

    def places(self) -> list[list[tuple[int, bool]]]:
        """Return, for each sequence, its blocks' addresses and whether each lies on the host."""


class Addresses:
    """A block table [seqs, blocks] int64 of addresses that follows a store, and a bool table that marks blocks on the host.

    Both tensors keep their addresses while there is room. Only rows of sequences whose blocks have changed are written.

    some_on_host: whether any block lies on the host.
    """

    def __init__(self) -> None:
        self.table = torch.empty((0, 0), dtype=torch.int64)
        self.on_host = torch.empty(0, dtype=torch.bool)
        self.some_on_host, self._version = False, -1
        self._written: list[list[tuple[int, bool]]] = []  # as places()

    def make_room(self, host: Blocks, tokens: int, device: torch.device) -> None:
        """Grow the table to `tokens` per sequence. It becomes a new tensor only if it was too small."""
        self._allocate(host.seqs, max(8, -(-tokens // host.block_size)), device)

    def follow(self, host: Blocks, device: torch.device) -> Tensor:
        """Return the table with the store's current addresses. Only changed rows are written. No host sync."""
        write([self.changes(host, device)], device)
        return self.table

    def changes(self, host: Blocks, device: torch.device) -> list[tuple[Tensor, list[int]]]:
        """Return pairs of a view of the tables and the values that write() has yet to write there."""
        if self._version == host.version:
            return []
        places = host.places()
        width = max(map(len, places), default=0)
        if self.table.shape[0] != len(places) or self.table.shape[1] < width:
            self._allocate(len(places), max(8, 2 * width), device)
        found = list[tuple[Tensor, list[int]]]()
        for seq, (row, written) in enumerate(zip(places, self._written, strict=True)):
            if row != written:
                most = max(len(row), len(written))
                now, before = ([*some, *[(0, False)] * (most - len(some))] for some in (row, written))
                for mine, column in ((self.table, 0), (self.on_host, 1)):
                    its = [int(place[column]) for place in now]
                    if its != [place[column] for place in before]:
                        found.append((mine[seq, :most], its))
        self._version, self._written = host.version, places
        self.some_on_host = any(on_host for row in places for _, on_host in row)
        return found

    def _allocate(self, seqs: int, width: int, device: torch.device) -> None:
        if self.table.shape[0] != seqs or self.table.shape[1] < width:
            self.table, self._version = torch.zeros((seqs, width), dtype=torch.int64, device=device), -1
            self.on_host, self._written = torch.zeros((seqs, width), dtype=torch.bool, device=device), [[] for _ in range(seqs)]


def write(changes: Iterable[Sequence[tuple[Tensor, list[int]]]], device: torch.device) -> None:
    """Write the changed values into the tables with one copy to the device. No host sync."""
    every = [change for own in changes for change in own]
    if every:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("blocks have moved while a step is captured; every replay would bring these addresses back")
        numbers = upload([number for _, its in every for number in its], torch.int64, device)
        torch._foreach_copy_([mine for mine, _ in every], numbers.split([len(its) for _, its in every]))
