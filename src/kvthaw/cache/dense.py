"""A layer that keeps all of its KV on the device and attends to all of it: full attention, and the dense first layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from kvthaw.kernels.dense import causal_attention
from kvthaw.kernels.flash_decode import flash_decode
from kvthaw.kernels.sparse_decode import sparse_decode

if TYPE_CHECKING:
    from kvthaw.cache.layer import Attention, FrozenLayer


WATCHED = 64
"""The prompt's last queries, which some indices look at."""


def watch(before: Tensor | None, query: Tensor) -> Tensor:
    """The last WATCHED queries of a prompt that came in parts, [B, Hq, W, D]."""
    last = query[:, :, -WATCHED:]
    return last.clone() if before is None else torch.cat((before, last), dim=2)[:, :, -WATCHED:].clone()


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
        self.static = False
        """Take single tokens by device counters alone, at fixed addresses, as a captured step must."""
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.seen = 0
        self.left_pad: list[int] = []
        self.watched: Tensor | None = None
        self.scale = 0.0
        self._data: Tensor | None = None
        self._end = self._begin = torch.empty(
            0
        )  # [B] int32 on the device: where each lane's tokens end and begin in the buffer

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
        if self.static and fresh and steps == 1:
            return self._step(query, key, value, how)
        if fresh:
            self.left_pad = left_pad
            self._append(key, value)
            if steps > 1 or self.watched is None:
                self.watched, self.scale = watch(self.watched, query), how.scale
        assert self._data is not None
        keys, values = self._data[:, :, : self.seen, 0], self._data[:, :, : self.seen, 1]
        if not any(self.left_pad):
            return causal_attention(query, keys, values, scale=how.scale, softcap=how.softcap, sinks=how.sinks)
        if steps == 1:
            place = torch.arange(self.seen, device=query.device)
            visible = place >= torch.tensor(self.left_pad, device=query.device)[:, None]
            visible = visible[:, None].expand(-1, keys.shape[1], -1)
            out = sparse_decode(query[:, :, 0], keys, values, visible, scale=how.scale, softcap=how.softcap, sinks=how.sinks)
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

    def before_step(self) -> None:
        """Make room for one more token and set the device counters, so that a step is work of the device alone."""
        assert self._data is not None
        self._reserve(1)
        device = self._data.device
        if self._end.shape != (self.lanes,):
            self._end, self._begin = (torch.empty(self.lanes, dtype=torch.int32, device=device) for _ in range(2))
        self._end.fill_(self.seen)
        self._begin.copy_(torch.tensor(self.left_pad, dtype=torch.int32), non_blocking=True)

    def due(self) -> bool:
        """Whether before_step() must be called again: the buffer is full."""
        return self._data is None or self._data.shape[2] <= self.seen

    def count_step(self) -> None:
        """Count a step of one token that the device took by itself."""
        self.seen += 1

    def tensors(self) -> list[Tensor]:
        """What a step reads and writes at fixed addresses."""
        return [] if self._data is None else [self._data, self._end, self._begin]

    def _step(self, query: Tensor, key: Tensor, value: Tensor, how: Attention) -> Tensor:
        assert self._data is not None
        place = self._end[:1].long()
        self._data.index_copy_(2, place, torch.stack((key, value), dim=3))
        self._end.add_(1)
        self.seen += 1
        keys, values = self._data[:, :, :, 0], self._data[:, :, :, 1]
        out = flash_decode(
            query[:, :, 0],
            keys,
            values,
            scale=how.scale,
            softcap=how.softcap,
            sinks=how.sinks,
            lengths=self._end,
            starts=self._begin,
        )
        return out[:, :, None]

    def copy_from(self, other: FrozenLayer | DenseLayer) -> None:
        """Take over the tokens of another layer."""
        if other.seen:
            self.left_pad, self.watched, self.scale = list(other.left_pad), other.watched, other.scale
            self._append(*padded(other))

    def crop(self, drop: int) -> None:
        """Forget the last `drop` tokens of every lane."""
        self.seen = max(0, self.seen - max(0, drop))
        self.left_pad = [min(pad, self.seen) for pad in self.left_pad]
        if self.seen == 0:
            self.reset()

    def reorder(self, lanes: list[int]) -> None:
        """Lane i becomes what lane lanes[i] was."""
        if self._data is not None:
            self._data = self._data[torch.tensor(lanes, device=self._data.device)]
            self.left_pad = [self.left_pad[lane] for lane in lanes]
            self.watched = None if self.watched is None else self.watched[lanes]

    def _append(self, key: Tensor, value: Tensor) -> None:
        batch, heads, steps, dim = key.shape
        if self._data is None:
            self._data = torch.empty((batch, heads, steps + max(256, steps // 16), 2, dim), dtype=key.dtype, device=key.device)
        self._reserve(steps)
        end = self.seen + steps
        self._data[:, :, self.seen : end, 0] = key
        self._data[:, :, self.seen : end, 1] = value
        self.seen = end

    def _reserve(self, steps: int) -> None:
        assert self._data is not None
        need = self.seen + steps
        if need > self._data.shape[2]:
            batch, heads, _, _, dim = self._data.shape
            grown = self._data.new_empty((batch, heads, need + need // 2, 2, dim))
            grown[:, :, : self.seen] = self._data[:, :, : self.seen]
            self._data = grown
