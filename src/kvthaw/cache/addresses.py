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

    def on_host(self) -> Tensor:
        """Blocks that lie on the host, [seqs, blocks] bool."""


class Addresses:
    """A table [seqs, blocks] int64 that follows a store, and which of the blocks lie on the host, bool. Both tensors stay where
    they are while there is room. some_on_host: whether any does."""

    def __init__(self) -> None:
        self.table: Tensor | None = None
        self.on_host = torch.empty(0, dtype=torch.bool)
        self.some_on_host, self._version = False, -1

    def make_room(self, host: Blocks, tokens: int, device: torch.device) -> None:
        """Have room for so many tokens a sequence, in a new table where the one there is too small."""
        self._allocate(host.seqs, max(8, -(-tokens // host.block_size)), device)

    def follow(self, host: Blocks, device: torch.device) -> Tensor:
        """Return the table with the addresses as they are now; written only where the store's have changed. No host sync."""
        if self._version == host.version and self.table is not None:
            return self.table
        table, on_host = host.table(), host.on_host()
        width = table.shape[1]
        if self.table is None or self.table.shape[0] != table.shape[0] or self.table.shape[1] < width:
            self._allocate(table.shape[0], max(8, 2 * width), device)
        assert self.table is not None
        for mine, its in () if not width else ((self.table, table), (self.on_host, on_host)):
            mine[:, :width].copy_(its.pin_memory() if device.type == "cuda" else its, non_blocking=True)
        self._version, self.some_on_host = host.version, bool(on_host.any())
        return self.table

    def _allocate(self, seqs: int, width: int, device: torch.device) -> None:
        if self.table is None or self.table.shape[0] != seqs or self.table.shape[1] < width:
            self.table, self._version = torch.zeros((seqs, width), dtype=torch.int64, device=device), -1
            self.on_host = torch.zeros((seqs, width), dtype=torch.bool, device=device)
