"""Start a sequence with kept rows, as a prefill of its tokens would have, without running the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from kvthaw.cache.dense import DenseLayer
from kvthaw.cache.host_memory import Block
from kvthaw.cache.index_updater import Snapshot
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.cache.step import Step
from kvthaw.config import KvDtype
from kvthaw.kernels.row_format import RowFormat, row_format


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What is needed to allocate a layer.

    queries, keys: [1, Hq, 0, D] and [1, H, 0, D], of its device and dtype.
    scale: its softmax scale.
    format: how blocks hold its rows.
    """

    queries: Tensor
    keys: Tensor
    scale: float
    format: RowFormat

    @classmethod
    def of(cls, layer: OffloadedLayer | DenseLayer, seq: int, kv_dtype: KvDtype | None) -> LayerShape:
        """Return the shape of a layer after the prompt of a sequence."""
        queries = layer.recent_queries[seq][None, :, :0]
        keys = layer.read(seq, 0, 0)[None, :, :, 0].to(queries.device)
        return cls(queries, keys, layer.scale, row_format(kv_dtype, keys.shape[3], keys.dtype))

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of a block of KV."""
        return self.keys.shape[1] * block_size * self.format.row_bytes


def copy_rows(layer: DenseLayer, seq: int, start: int, stop: int, block: Block, format: RowFormat) -> None:
    """Copy rows start .. stop of a sequence to the beginning of a block. Copies from a GPU are only enqueued."""
    block.data[:, : stop - start].copy_(format.encode(layer.read(seq, start, stop)), non_blocking=True)


def resume(
    layer: OffloadedLayer | DenseLayer,
    step: Step,
    shape: LayerShape,
    blocks: Mapping[int, Sequence[Block]],
    queries: Mapping[int, Tensor] = MappingProxyType({}),
    kept: Mapping[int, Snapshot] = MappingProxyType({}),
) -> None:
    """Append the first tokens of sequences to a layer, from blocks of stored rows.

    A layer that offloads shares the blocks. Its index is built from them, with the rest of an announced prompt, or before
    the next step that selects.

    blocks: by sequence, in token order.
    queries: by sequence, the last queries [Hq, W, D] of these tokens, if known.
    kept: by sequence, an index snapshot of at least these tokens.
    """
    if isinstance(layer, OffloadedLayer):
        if layer.plan is None:
            layer.allocate(step, shape.queries, shape.keys, shape.scale)
        layer.resume(step, blocks, kept)
    else:
        layer.scale, rows = shape.scale, []
        for row in step.rows():
            stored = [block.data.to(shape.keys.device, non_blocking=True) for block in blocks[row.seq]]
            own = shape.format.decode(torch.cat(stored, dim=1))
            rows.append(F.pad(own[:, : step.tokens - row.pad], (0, 0, 0, 0, row.pad, 0)))
        data = torch.stack(rows)
        layer.append(step, shape.queries.expand(len(rows), -1, -1, -1), data[:, :, :, 0], data[:, :, :, 1])
    layer.recent_queries.update(queries)
