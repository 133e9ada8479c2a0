"""A sequence as a value: what each layer has of it. Swapping, prefixes and saved files are uses of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    """State of one sequence in one layer, where it lies or in host memory. It is an owner of its blocks until release().

    blocks: its stored rows in token order.
    stored: number of these rows.
    format: how the blocks hold them; None: as the layer does.
    held: its sink and ring; None: they hold rows of the blocks.
    queries: the last queries of its prompt, [Hq, W, D].
    index: None: the index is built from the rows.
    """

    blocks: Sequence[Block] = ()
    stored: int = 0
    format: RowFormat | None = None
    held: Tensor | None = None
    queries: Tensor | None = None
    index: IndexState | None = None

    def on_host(self, memory: HostMemory) -> LayerState:
        """Return this state in host memory, and release this one. Copies from a GPU are only enqueued.

        Raises HostMemoryError.
        """
        try:
            blocks = [block.copied(memory) if block.on_device else block for block in self.blocks]
            blocks = [block.share() for block in blocks]
        finally:
            self.release()
        held = None if self.held is None else self.held.to("cpu", copy=True)
        return replace(self, blocks=blocks, held=held, queries=None if self.queries is None else self.queries.cpu())

    def release(self) -> None:
        """Release the blocks."""
        for block in self.blocks:
            block.release()


@dataclass(frozen=True, slots=True)
class SequenceState:
    """A sequence in host memory: its length, where its ring begins, and its state in each layer.

    home: the layers in force when it was exported, to which it must return.
    nonfinite: numbers of the layers whose keys or values were not finite.
    states: state of layers that kvthaw does not serve.
    """

    length: int
    ring_start: int
    layers: Sequence[LayerState]
    home: tuple[object, ...]
    nonfinite: Sequence[int] = ()
    states: dict[Any, Tensor] = field(default_factory=dict)

    def host_bytes(self) -> int:
        """Return the bytes of its KV in host memory, including blocks shared with a prefix cache."""
        return sum(block.data.nbytes for layer in self.layers for block in layer.blocks)

    def release(self) -> None:
        """Release all blocks."""
        for layer in self.layers:
            layer.release()
