"""Pinned buffers for an index on the host: the query from the device, and the selection for it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvthaw.cache.host_memory import host_tensor
from kvthaw.cache.index_api import IndexContext

Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class HostSelectionBuffer:
    """Buffers of one layer group for `seqs` sequences, pinned if the group is on a GPU, at fixed addresses.

    query: [B, Hq, D] float32.
    answer: bytes, copied to the device in one copy; parts() splits them.
    """

    def __init__(self, context: IndexContext, seqs: int, rows: int, slots: int) -> None:
        heads, pinned = (seqs, context.kv_heads), context.device.type == "cuda"
        each, live = ((*heads, rows), torch.int32), ((*heads, slots), torch.bool)
        self._parts = (each, (heads, torch.int32), each, each, live)
        self._bytes = [math.prod(size) * dtype.itemsize for size, dtype in self._parts]
        self.query = host_tensor((seqs, context.q_heads, context.head_dim), torch.float32, pinned=pinned)
        self.answer = host_tensor((sum(self._bytes),), torch.uint8, pinned=pinned)

    def parts(self, answer: Tensor) -> Parts:
        """Split an answer into a selection and a choice: rows [B, H, M], counts [B, H]; slots, fetch [B, H, M], live [B, H,
        C]."""
        pieces = zip(answer.split(self._bytes), self._parts, strict=True)
        rows, counts, slots, fetch, live = (piece.view(dtype).view(size) for piece, (size, dtype) in pieces)
        return rows, counts, slots, fetch, live
