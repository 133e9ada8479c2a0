"""A layer that keeps all of its KV on the device and attends to all of it: full attention, and the dense first layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from kvthaw.errors import CacheError
from kvthaw.kernels.dense import causal_attention
from kvthaw.kernels.sparse_decode import sparse_decode

if TYPE_CHECKING:
    from kvthaw.cache.layer import Attention, FrozenLayer


WATCHED = 64
"""The prompt's last queries, which some indices look at."""


def padded(layer: FrozenLayer | DenseLayer) -> tuple[Tensor, Tensor]:
    """All keys and values of a layer, [B, H, seen, D] each, zeros for the left padding, where its queries are."""
    assert layer.watched is not None
    lanes = []
    for lane in range(layer.lanes):
        rows = layer.read(lane, 0, layer.length(lane)).to(layer.watched.device)
        lanes.append(F.pad(rows, (0, 0, 0, 0, layer.left_pad[lane], 0)))
    data = torch.stack(lanes)
    return data[:, :, :, 0], data[:, :, :, 1]


class DenseLayer:
    """KV of one layer, [B, H, seen, 2, D] in token order with the left padding, in a buffer that grows by half."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.seen = 0
        self.left_pad: list[int] = []
        self.watched: Tensor | None = None
        self.scale = 0.0
        self._data: Tensor | None = None

    @property
    def lanes(self) -> int:
        return len(self.left_pad)

    def length(self, lane: int) -> int:
        """Tokens of a lane, padding not counted."""
        return self.seen - self.left_pad[lane]

    def read(self, lane: int, start: int, stop: int) -> Tensor:
        """Rows [H, stop - start, 2, D] of a lane, on the device."""
        assert self._data is not None
        pad = self.left_pad[lane]
        return self._data[lane, :, pad + start : pad + stop]

    def device_bytes(self) -> int:
        """Bytes of KV on the device."""
        return 0 if self._data is None else self._data[:, :, : self.seen].numel() * self._data.element_size()

    def host_bytes(self) -> int:
        return 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, left_pad: list[int], how: Attention, fresh: bool) -> Tensor:
        """As FrozenLayer.attend."""
        steps = query.shape[2]
        if self._data is not None and query.shape[0] != self._data.shape[0]:
            raise CacheError(
                f"the cache holds {self._data.shape[0]} rows and was given {query.shape[0]}; use one cache for each batch"
            )
        if fresh:
            self.left_pad = left_pad
            self._append(key, value)
            if steps > 1 or self.watched is None:
                self.watched, self.scale = query[:, :, -WATCHED:].clone(), how.scale
        assert self._data is not None
        keys, values = self._data[:, :, : self.seen, 0], self._data[:, :, : self.seen, 1]
        if not any(self.left_pad):
            return causal_attention(query, keys, values, scale=how.scale, softcap=how.softcap, sinks=how.sinks)
        if steps == 1:
            place = torch.arange(self.seen, device=query.device)
            visible = place >= torch.tensor(self.left_pad, device=query.device)[:, None]
            visible = visible[:, None].expand(-1, keys.shape[1], -1)
            out = sparse_decode(
                query[:, :, 0], keys, values, visible, scale=how.scale, softcap=how.softcap, sinks=how.sinks
            )
            return out[:, :, None]
        out = torch.zeros_like(query)
        for lane, left in enumerate(self.left_pad):
            skip = min(steps, max(0, left - (self.seen - steps)))
            if skip < steps:
                q, k, v = query[lane : lane + 1, :, skip:], keys[lane : lane + 1, :, left:], values[lane : lane + 1, :, left:]
                out[lane : lane + 1, :, skip:] = causal_attention(
                    q, k, v, scale=how.scale, softcap=how.softcap, sinks=how.sinks
                )
        return out

    def copy_from(self, other: FrozenLayer | DenseLayer) -> None:
        """Take over the tokens of another layer."""
        if other.seen:
            self.left_pad, self.watched, self.scale = list(other.left_pad), other.watched, other.scale
            self._append(*padded(other))

    def crop(self, drop: int) -> None:
        """Forget the last `drop` tokens of every lane."""
        self.seen = max(0, self.seen - max(0, drop))
        if self.seen == 0:
            self.reset()

    def reorder(self, lanes: list[int]) -> None:
        """Lane i becomes what lane lanes[i] was."""
        if self._data is not None:
            self._data = self._data[torch.tensor(lanes, device=self._data.device)]
            self.left_pad = [self.left_pad[lane] for lane in lanes]

    def _append(self, key: Tensor, value: Tensor) -> None:
        batch, heads, steps, dim = key.shape
        need = self.seen + steps
        if self._data is None or self._data.shape[2] < need:
            capacity = need + 64 if self._data is None else need + need // 2
            grown = torch.empty((batch, heads, capacity, 2, dim), dtype=key.dtype, device=key.device)
            if self._data is not None:
                grown[:, :, : self.seen] = self._data[:, :, : self.seen]
            self._data = grown
        self._data[:, :, self.seen : need, 0] = key
        self._data[:, :, self.seen : need, 1] = value
        self.seen = need
