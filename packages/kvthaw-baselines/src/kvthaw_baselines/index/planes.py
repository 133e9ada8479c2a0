"""Random planes through the origin: the signs of their products are a vector's bits in MagicPIG's and SOCKET's tables."""

from __future__ import annotations

import torch
from torch import Tensor

from kvthaw.cache.index_api import IndexContext
from kvthaw.index.draws import stream


class Planes:
    """`tables` codes of `bits` bits each for vectors of every KV head of a layer.

    directions [H, D, tables * bits] float32, normal to the planes, of the seed, the layer and the KV head. Bit i of a code is the
    sign of direction i of its table.
    """

    def __init__(self, context: IndexContext, *, tables: int, bits: int) -> None:
        self.tables, self.bits = tables, bits
        directions = []
        for head in range(context.kv_heads):
            generator = torch.Generator().manual_seed(stream(context) + head)
            directions.append(torch.randn(context.head_dim, tables * bits, generator=generator))
        self.directions = torch.stack(directions).to(context.device)
        self._powers = (1 << torch.arange(bits, device=context.device)).float()

    def code(self, vectors: Tensor) -> Tensor:
        """Vectors [..., H, n, D] -> codes [..., H, n, tables] float32, whole numbers."""
        wide = torch.promote_types(vectors.dtype, torch.float32)  # a sign of float64 vectors hangs on no rounding of float32
        signs: Tensor = (vectors.to(wide) @ self.directions.to(wide) >= 0).float().unflatten(-1, (self.tables, self.bits))
        return signs @ self._powers

    def tensors(self) -> list[Tensor]:
        """What code() reads."""
        return [self.directions, self._powers]
