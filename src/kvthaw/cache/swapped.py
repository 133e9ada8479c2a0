"""The state of a swapped-out sequence in host memory."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kvthaw.cache.host_memory import Block, HostMemory


@dataclass(frozen=True, slots=True)
class SwappedLayer:
    """State of one sequence in one layer, in host memory.

    home: the layer's allocation, to which it must return; see LayerKV.home.
    blocks: its rows in token order, `stored` of them.
    held: its sink and ring.
    queries: the last queries of its prompt.
    index, indexed, stale: see IndexUpdater.swap_out.
    """

    home: weakref.ref[Any]
    blocks: Sequence[Block] = ()
    stored: int = 0
    held: Tensor | None = None
    queries: Tensor | None = None
    index: Any = None
    indexed: int = 0
    stale: bool = False

    def release(self) -> None:
        """Release the blocks."""
        for block in self.blocks:
            block.release()


@dataclass(frozen=True, slots=True)
class Swapped:
    """A swapped-out sequence: its length, where its ring begins, and its state in each layer.

    states: state of layers that kvthaw does not serve.
    """

    length: int
    ring_start: int
    layers: Sequence[SwappedLayer]
    states: dict[Any, Tensor] = field(default_factory=dict)

    def host_bytes(self) -> int:
        """Return the bytes of its KV in host memory, including blocks shared with a prefix cache."""
        return sum(block.data.nbytes for layer in self.layers for block in layer.blocks)

    def release(self) -> None:
        """Release all blocks."""
        for layer in self.layers:
            layer.release()


def to_blocks(rows: Tensor, size: int, memory: HostMemory) -> list[Block]:
    """Copy rows [H, T, ...] to host memory, in blocks of `size` tokens. Copies from a GPU are only enqueued.

    Raises HostMemoryError.
    """
    blocks = []
    for part in rows.split(size, dim=1):
        blocks.append(Block(memory.allocate(part.shape, part.dtype, pinned=part.is_cuda)).share())
        blocks[-1].data.copy_(part, non_blocking=True)
    return blocks
