"""Begin a sequence with rows that are kept: as a prefill of them would have, without the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvthaw.cache.dense import DenseLayer
from kvthaw.cache.host_memory import Block, HostMemory
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.cache.step import Step


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What a layer is allocated by: queries [1, Hq, 0, D] and keys [1, H, 0, D] of its device and dtype, its softmax scale."""

    queries: Tensor
    keys: Tensor
    scale: float

    @classmethod
    def of(cls, layer: OffloadedLayer | DenseLayer, seq: int) -> LayerShape:
        """Return the shape of a layer, a sequence of which has had a prompt."""
        queries = layer.recent_queries[seq][None, :, :0]
        return cls(queries, layer.read(seq, 0, 0)[None, :, :, 0].to(queries.device), layer.scale)

    def block_bytes(self, block_size: int) -> int:
        """Bytes of a block of KV."""
        _, heads, _, dim = self.keys.shape
        return heads * block_size * 2 * dim * self.keys.itemsize


def copied(layer: DenseLayer, seq: int, start: int, stop: int, size: int, memory: HostMemory) -> Block:
    """Return a block of `size` tokens on the host that begins with rows start .. stop of a sequence; from a GPU they are only
    enqueued on the current stream. Raises HostMemoryError."""
    rows = layer.read(seq, start, stop)
    block = Block(memory.allocate((rows.shape[0], size, *rows.shape[2:]), rows.dtype, pinned=rows.is_cuda))
    block.data[:, : stop - start].copy_(rows, non_blocking=True)
    return block


def resume(layer: OffloadedLayer | DenseLayer, step: Step, shape: LayerShape, blocks: Sequence[Block]) -> None:
    """Take the tokens of a step, the first of their sequence, from blocks of rows [H, E, 2, D] in token order. A layer that
    offloads shares the blocks; its index is built from them when the prompt is whole."""
    (row,) = step.rows()
    if isinstance(layer, OffloadedLayer):
        if layer.plan is None:
            layer.allocate(step, shape.queries, shape.keys, shape.scale)
        layer.storage.resume(row.seq, blocks, step.tokens)
        return
    rows = [block.data.to(shape.keys.device, non_blocking=True) for block in blocks]
    data = torch.cat(rows, dim=1)[None, :, : step.tokens]
    layer.scale = shape.scale
    layer.append(step, shape.queries, data[:, :, :, 0], data[:, :, :, 1])
