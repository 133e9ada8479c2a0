"""A sequence as a value: what each layer has of it. Swapping, prefixes and saved files are uses of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kvthaw.cache.host_memory import Block, HostMemory
from kvthaw.kernels.row_format import RowFormat


@dataclass(frozen=True, slots=True)
class IndexState:
    """An index's state of one sequence, which covers positions first .. end.

    held: what Index.export() returned, or its tensors from a file.
    """

    held: Any
    first: int
    end: int

    def nbytes(self) -> int:
        """Return the bytes of host memory, including bytes shared with a sequence."""
        if isinstance(self.held, Mapping):
            return sum(tensor.nbytes for tensor in self.held.values())
        nbytes: int = self.held.nbytes()
        return nbytes


@dataclass(frozen=True, slots=True)
class LayerState:
    """State of one sequence in one layer. It is an owner of its blocks until release().

    blocks: its stored rows in token order.
    stored: number of these rows.
    format: how the blocks hold them; None: as the layer does.
    held: its sink and ring, on the host; None: they hold rows of the blocks.
    queries: the last queries of its prompt, [Hq, W, D].
    index: None: the index is built from the rows.
    """

    blocks: Sequence[Block] = ()
    stored: int = 0
    format: RowFormat | None = None
    held: Tensor | None = None
    queries: Tensor | None = None
    index: IndexState | None = None

    def release(self) -> None:
        """Release the blocks."""
        for block in self.blocks:
            block.release()


@dataclass(frozen=True, slots=True)
class SequenceState:
    """A sequence in host memory: its length, where its ring begins, and its state in each layer.

    home: the layers in force when it was exported, to which it must return.
    states: state of layers that kvthaw does not serve.
    """

    length: int
    ring_start: int
    layers: Sequence[LayerState]
    home: tuple[object, ...]
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
