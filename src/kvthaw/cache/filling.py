"""One lane of a running batch while a prompt comes in."""

from __future__ import annotations

from torch import Tensor

from kvthaw.cache.dense import DenseLayer
from kvthaw.cache.lanes import Lanes
from kvthaw.cache.layer import Attention, FrozenLayer
from kvthaw.errors import CacheError


class Filling(Lanes):
    """A layer as it looks to a prompt that goes to one of its lanes: a layer of that lane alone, whose tokens are all prompt."""

    def __init__(self, kv: FrozenLayer | DenseLayer, lane: int) -> None:
        super().__init__()
        self.kv, self.lane, self.number = kv, lane, kv.number
        self.seen, self.left_pad = kv.length(lane), [0]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, left_pad: list[int], how: Attention, fresh: bool) -> Tensor:
        """As FrozenLayer.attend, with every pass dense. Raises CacheError where another layer shares this one's KV."""
        if not fresh:
            raise CacheError(f"another layer shares the KV of layer {self.number}; a batch of lanes does not serve that")
        out = self.kv.fill(self.lane, query, key, value, how)
        self.seen += query.shape[2]
        return out

    def reserved(self, lane: int) -> int:
        """As FrozenKV.reserved, of the lane that is filled."""
        return self.kv.reserved(self.lane) if isinstance(self.kv, FrozenLayer) else 0

    def reset(self) -> None:
        """Nothing: who fills a lane clears it."""
