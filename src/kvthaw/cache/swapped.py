"""What waits in host memory of a sequence of a running batch while others have its place."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kvthaw.cache.host_memory import Block, HostMemory


@dataclass(frozen=True, slots=True)
class SwappedLayer:
    """What a layer held of a sequence, in host memory. home: what held it. blocks: its rows in token order, `stored` of them. held:
    its ring; queries: its prompt's last; index, indexed, stale: see IndexUpdater."""

    home: weakref.ref[Any]
    blocks: Sequence[Block] = ()
    stored: int = 0
    held: Tensor | None = None
    queries: Tensor | None = None
    index: Any = None
    indexed: int = 0
    stale: bool = False

    def release(self) -> None:
        """Share the blocks no longer."""
        for block in self.blocks:
            block.release()


@dataclass(frozen=True, slots=True)
class Swapped:
    """A sequence in host memory: its length, where its ring begins, and what each layer held of it. states: of other layers."""

    length: int
    ring_start: int
    layers: Sequence[SwappedLayer]
    states: dict[Any, Tensor] = field(default_factory=dict)

    def host_bytes(self) -> int:
        """Bytes of its KV in host memory, those shared with a prefix cache included."""
        return sum(block.data.nbytes for layer in self.layers for block in layer.blocks)

    def release(self) -> None:
        """Forget it."""
        for layer in self.layers:
            layer.release()


def to_blocks(rows: Tensor, size: int, memory: HostMemory) -> list[Block]:
    """Copy rows [H, T, ...] to host memory, in blocks of so many tokens; from a GPU they are only enqueued. Raises
    HostMemoryError."""
    blocks = []
    for part in rows.split(size, dim=1):
        blocks.append(Block(memory.allocate(part.shape, part.dtype, pinned=part.is_cuda)).share())
        blocks[-1].data.copy_(part, non_blocking=True)
    return blocks
