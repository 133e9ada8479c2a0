"""The blocks of each sequence of a layer, and the tensors by which kernels find them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvthaw.cache.host_memory import Block
from kvthaw.kernels.gpu import capturing, upload

Change = tuple[Tensor, list[int]]
"""A view of a table's tensor, and the values to write there."""


class BlockTable:
    """Which blocks a sequence has, and where each lies, on the host and in tensors on the device.

    The tensors keep their addresses while there is room. Only the rows of changed sequences are written.

    blocks: by sequence, earlier positions first. Whoever changes the lists calls changed() afterwards.
    block_size: tokens per block.
    version: number of changes so far.
    addresses: [seqs, blocks] int64 on the device, the address of each block; 0 behind the last.
    on_host: [seqs, blocks] bool on the device, whether the block lies on the host.
    """

    def __init__(self, seqs: int, block_size: int) -> None:
        self.blocks: list[list[Block]] = [[] for _ in range(seqs)]
        self.block_size, self.version = block_size, 0
        self.addresses = torch.empty((0, 0), dtype=torch.int64)
        self.on_host = torch.empty((0, 0), dtype=torch.bool)
        self._known: tuple[int, Tensor] | None = None  # a version, and its addresses on the CPU
        self._changed = set[int]()  # sequences, since changes() was called last
        self._at = -1  # the version that the device has
        self._written: list[list[tuple[int, int]]] = []  # what it has of each sequence; below 0: unknown
        self._hosted = set[int]()  # sequences of that version with a block on the host

    def changed(self, *seqs: int) -> None:
        """Record that the blocks of sequences have changed."""
        self._changed.update(seqs)
        self.version += 1

    def row(self, seq: int) -> Tensor:
        """Return the address of each block of a sequence, [blocks] int64 on the CPU."""
        return torch.tensor([block.place[0] for block in self.blocks[seq]], dtype=torch.int64)

    def on_cpu(self) -> Tensor:
        """Return the addresses of all sequences' blocks, [seqs, most blocks] int64 on the CPU, 0 padded."""
        known, version = self._known, self.version  # read first: another thread may add blocks meanwhile
        if known is None or known[0] != version:
            rows = [self.row(seq) for seq in range(len(self.blocks))]
            known = self._known = version, torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return known[1]

    def which_on_host(self) -> Tensor:
        """Return which blocks lie on the host, [seqs, most blocks] bool on the CPU."""
        rows = [torch.tensor([not block.on_device for block in blocks], dtype=torch.bool) for blocks in self.blocks]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    @property
    def some_on_host(self) -> bool:
        """Whether `on_host` marks any block. The device may have an older version than `version`."""
        return bool(self._hosted)

    def all_on_device(self) -> bool:
        """Return whether no block lies on the host."""
        if self._at == self.version:
            return not self._hosted
        return all(block.on_device for blocks in self.blocks for block in blocks)

    def on(self, device: torch.device) -> Tensor:
        """Return `addresses` with the current addresses; see follow()."""
        return follow([self], device)[0]

    def make_room(self, tokens: int, device: torch.device) -> None:
        """Grow the tensors to `tokens` tokens per sequence. They keep their place until a sequence has more."""
        self._allocate(max(8, -(-tokens // self.block_size)), device)

    def changes(self, device: torch.device) -> list[Change]:
        """Return what the tensors lack. The caller writes it."""
        if self._at == self.version:
            return []
        version, count = self.version, len(self.blocks)
        seqs, self._changed = self._changed, set()
        if self._at < 0 or self.addresses.shape[0] != count:
            seqs = set(range(count))
        places = {seq: self._places(seq) for seq in seqs if seq < count}
        width = max(map(len, places.values()), default=0)
        if self.addresses.shape[0] != count or self.addresses.shape[1] < width:
            self._allocate(max(8, 2 * width), device)
            places |= {seq: self._places(seq) for seq in range(count) if seq not in places}
        found = list[Change]()
        for seq, row in places.items():
            written, self._written[seq] = self._written[seq], row
            (self._hosted.add if any(on_host for _, on_host in row) else self._hosted.discard)(seq)
            if row != written:
                most = max(len(row), len(written))
                now, before = ([*some, *[(0, False)] * (most - len(some))] for some in (row, written))
                for mine, column in ((self.addresses, 0), (self.on_host, 1)):
                    its = [int(place[column]) for place in now]
                    if its != [place[column] for place in before]:
                        found.append((mine[seq, :most], its))
        self._at = version
        return found

    def forget_device(self) -> None:
        """Mark what the device has as unknown, after a copy to it failed."""
        self._at, self._written = -1, [[(-1, -1)] * self.addresses.shape[1] for _ in range(self.addresses.shape[0])]

    def _places(self, seq: int) -> list[tuple[int, int]]:
        return [block.place for block in self.blocks[seq]]

    def _allocate(self, width: int, device: torch.device) -> None:
        """Allocate the tensors again if they are too small or of another number of sequences."""
        size = len(self.blocks), width
        if self.addresses.shape[0] != size[0] or self.addresses.shape[1] < width:
            self.addresses = torch.zeros(size, dtype=torch.int64, device=device)
            self.on_host = torch.zeros(size, dtype=torch.bool, device=device)
            self._at, self._written = -1, [[] for _ in range(size[0])]
            self._hosted.clear()


def follow(tables: Sequence[BlockTable], device: torch.device) -> list[Tensor]:
    """Write the changes of several tables with one copy to the device. Returns their `addresses`. No host sync."""
    try:
        if every := [change for table in tables for change in table.changes(device)]:
            if capturing(device):
                raise RuntimeError("blocks have moved while a step is captured; every replay would bring these addresses back")
            numbers = upload([number for _, its in every for number in its], torch.int64, device)
            torch._foreach_copy_([mine for mine, _ in every], numbers.split([len(its) for _, its in every]))
    except BaseException:
        for table in tables:
            table.forget_device()
        raise
    return [table.addresses for table in tables]
