"""Where the blocks of a host store lie, on the device: what a kernel needs that reads rows from the host."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Blocks(Protocol):
    """A store of blocks: what the table follows."""

    block_size: int
    version: int

    @property
    def seqs(self) -> int:
        """Number of sequences."""

    def table(self) -> Tensor:
        """Addresses [seqs, blocks] int64 on the host."""


class Addresses:
    """A table [seqs, blocks] int64 that follows a store. It stays where it is while there is room."""

    def __init__(self) -> None:
        self.table: Tensor | None = None
        self._version = -1

    def make_room(self, host: Blocks, tokens: int, device: torch.device) -> None:
        """Have room for so many tokens a sequence, in a new table where the one there is too small."""
        shape = host.seqs, max(8, -(-tokens // host.block_size))
        if self.table is None or self.table.shape[0] != shape[0] or self.table.shape[1] < shape[1]:
            self.table, self._version = torch.zeros(shape, dtype=torch.int64, device=device), -1

    def follow(self, host: Blocks, device: torch.device) -> Tensor:
        """The table with the addresses as they are now; written only where the store's have changed. No host sync."""
        if self._version == host.version and self.table is not None:
            return self.table
        table = host.table()
        width = table.shape[1]
        if self.table is None or self.table.shape[0] != table.shape[0] or self.table.shape[1] < width:
            self.table = torch.zeros((table.shape[0], max(8, 2 * width)), dtype=torch.int64, device=device)
        self.table[:, :width].copy_(table.pin_memory() if device.type == "cuda" else table, non_blocking=True)
        self._version = host.version
        return self.table
