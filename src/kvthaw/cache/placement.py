"""The blocks of one layer move between device and host.

Between steps, blocks spill to the host and return to the device one at a time. The copy stream copies a block while later
steps run. The block table changes between two steps, once the copy is complete. Kernels and captured steps therefore read
either the old block or the new one. The old block is reused after all work that may read it.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain, zip_longest

import torch
from torch import Tensor

from kvthaw.cache.device_memory import DeviceBlocks
from kvthaw.cache.host import HostStore
from kvthaw.cache.host_memory import Block
from kvthaw.cache.streams import Streams
from kvthaw.errors import HostMemoryError
from kvthaw.kernels.gpu import Download

_log = logging.getLogger(__name__)


class Placement:
    """Move the blocks of one store between device and host.

    device: the layer's share of device memory.
    moved_bytes: bytes of blocks copied so far, in both directions.
    """

    def __init__(self, store: HostStore, device: DeviceBlocks, streams: Streams) -> None:
        self.store, self.device, self.streams = store, device, streams
        self.moved_bytes = 0
        self._moves: list[tuple[Block, Block, torch.cuda.Event | None]] = []
        self._leaving: deque[tuple[list[torch.cuda.Event], Tensor]] = deque()  # host blocks that kernels may still read
        self._recalls: Download | None = None
        self._none: tuple[int, bool] | None = None  # version of the store at which no block could spill, or come back
        self._short = False  # of host memory

    def make_room(self, tokens: int, fixed: int) -> None:
        """Expect `tokens` tokens of every sequence, and `fixed` bytes of slab and index."""
        device, blocks = self.device, self.store.seqs * -(-tokens // self.store.block_size)
        room = device.memory.share(device.layer) + device.memory.fixed.get(device.layer, 0) - fixed
        device.memory.spills |= blocks * device.size > room
        if device.memory.spills:
            _load_kernels(device.device)

    def balance(self, needed: int, recalled: Tensor | None) -> None:
        """Make room on the device for `needed` more blocks, or use spare room: finish complete copies and start one.

        recalled: [B, H, C] int32, the rows selected last, -1 padded, from which recently selected blocks follow; None:
            unknown.
        """
        table, size = self.store.table, self.device.size
        idle = not (self._moves or self._leaving or table.behind or table.some_on_host)
        if idle and self._recalls is None and self.device.room >= needed * size:
            return  # all blocks lie on the device, and more will fit
        self.finish()
        self.device.note_freed()
        self._count_recalls()
        coming = sum(new.on_device for _, new, _ in self._moves)
        going = len(self._moves) - coming
        room = self.device.room + going * size
        short, ample = room < needed * size, room >= (needed + self.store.seqs + 1) * size
        if (not short and not ample) or self._none == (table.version, short):
            return
        mine = [block for block in full_blocks(self.store, alone=short) if block.on_device == short and not block.moving]
        pick = min if short else max  # least or most selected: of several the oldest leaves, and the newest returns
        block = pick(mine if short else reversed(mine), key=lambda block: block.recalls, default=None)
        if block is None:
            self._none = self.store.table.version, short
        elif self._move(block, self._to_host if short else self._to_device) and recalled is not None:
            counts = count_by_block(recalled, self.store.block_size, self.store.table.on_cpu().shape[1])
            self._recalls = Download(counts)  # on a GPU after the steps under way
        self.finish()

    def brought(self, block: Block) -> Block:
        """Return a device copy of a host block that has a single owner, or the block itself if there is no room."""
        new = self._to_device() if block.owners == 1 and not block.on_device else None
        if new is None:
            return block
        new.data.copy_(block.data, non_blocking=True)
        self.moved_bytes += new.data.nbytes
        new.recalls = block.recalls
        return new

    def bring(self, blocks: Sequence[Block]) -> None:
        """Start to copy blocks to the device in order while there is room, as for a prompt."""
        for block in blocks:
            if not (block.on_device or block.moving or self._move(block, self._to_device)):
                break
        self.finish()

    def finish(self) -> None:
        """Replace blocks whose copies are complete."""
        complete = [move for move in self._moves if move[2] is None or move[2].query()]
        self._moves = [move for move in self._moves if move not in complete]
        for old, new, _ in complete:
            if old.moving is not new:
                continue  # written to since, perhaps copied again
            old.moving = None
            if not self.store.replace(old, new):
                continue  # cropped
            self.moved_bytes += old.data.nbytes
            if new.on_device:
                self._leaving.append((self.device.readers(), old.data))
        while self._leaving and all(event.query() for event in self._leaving[0][0]):
            self._leaving.popleft()

    def _count_recalls(self) -> None:
        """Set each block's recalls to the mean of the old value and the new count."""
        if self._recalls is None or not self._recalls.ready():
            return
        counts, self._recalls = self._recalls(), None
        sums: dict[Block, int] = {}
        for seq, own in zip(range(self.store.seqs), counts.tolist(), strict=False):
            known = max(0, self.store.length(seq) // self.store.block_size - 1)  # the last one's tokens may be in the ring
            for block, count in zip(self.store.blocks(seq)[:known], own, strict=False):
                sums[block] = sums.get(block, 0) + count
        for block, recalls in sums.items():
            block.recalls = recalls if block.recalls == math.inf else (block.recalls + recalls) / 2

    # Copies

    def _move(self, block: Block, place: Callable[[], Block | None]) -> bool:
        """Start to copy a block to a new one. Returns whether one could be allocated."""
        device = self.device.device
        with self.streams.beside(device):  # behind what has yet to write to the block
            new = place()
            if new is None:
                return False
            new.data.copy_(block.data, non_blocking=True)
            done = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        block.moving = new
        self._moves.append((block, new, done))
        return True

    def _to_device(self) -> Block | None:
        data = self.device.take(1)
        return Block(data[0], on_device=True) if data else None

    def _to_host(self) -> Block | None:
        try:
            return Block(self.store.memory.allocate(self.store.shape, self.store.format.stored, pinned=self.store.pinned))
        except HostMemoryError as error:
            if not self._short:
                self._short = True
                _log.warning("blocks stay on the device, host memory is short: %s", error)
            return None


def count_by_block(rows: Tensor, block_size: int, blocks: int) -> Tensor:
    """Count rows [B, H, C] int32, -1 padded, by block: [B, blocks + 1] int32. The last column counts the padding."""
    rows = rows.flatten(1).long()
    number = torch.where(rows >= 0, rows // block_size, blocks).clamp_(max=blocks)
    counts = torch.zeros((len(rows), blocks + 1), dtype=torch.int32, device=rows.device)
    return counts.scatter_add_(1, number, torch.ones_like(number, dtype=torch.int32))


@cache
def _load_kernels(device: torch.device) -> None:
    """Load the CUDA kernels that count rows, so that the first step that spills a block does not wait for them."""
    count_by_block(torch.zeros((1, 1, 1), dtype=torch.int32, device=device), 1, 1)


def full_blocks(store: HostStore, *, alone: bool = False) -> list[Block]:
    """Return the full blocks of a store, earlier positions first.

    alone: include full blocks of the prefix cache, and leave out blocks that another store shares.
    """
    counts: dict[Block, int] = {}
    full = [store.blocks(seq)[: store.length(seq) // store.block_size] for seq in range(store.seqs)]
    kept = store.kept.values() if alone else ()
    for block in chain(chain.from_iterable(zip_longest(*full)), kept):
        if block is not None:
            counts[block] = counts.get(block, 0) + 1
    return [block for block, count in counts.items() if not alone or count == block.owners]
