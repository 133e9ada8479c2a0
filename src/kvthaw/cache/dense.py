"""A layer that keeps all of its KV on the device and attends to all of it: full attention, and the dense first layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from kvthaw.cache.clock import Clock
from kvthaw.kernels.dense import causal_attention
from kvthaw.kernels.sparse_decode import sparse_decode

if TYPE_CHECKING:
    from kvthaw.cache.frozen import FrozenKV
    from kvthaw.cache.layer import Attention


WATCHED = 128
"""The prompt's last queries, which some indices look at."""


def watch(before: Tensor | None, query: Tensor) -> Tensor:
    """The last WATCHED queries of a prompt that came in parts, [B, Hq, W, D]."""
    last = query[:, :, -WATCHED:]
    return last.clone() if before is None else torch.cat((before, last), dim=2)[:, :, -WATCHED:].clone()


def padded(layer: FrozenKV | DenseLayer) -> tuple[Tensor, Tensor]:
    """All keys and values of a layer, [B, H, seen, D] each, zeros for the left padding, where its queries are."""
    assert layer.watched is not None
    lanes = []
    for lane in range(layer.lanes):
        rows = layer.read(lane, 0, layer.length(lane)).to(layer.watched.device)
        lanes.append(F.pad(rows, (0, 0, 0, 0, layer.left_pad[lane], 0)))
    data = torch.stack(lanes)
    return data[:, :, :, 0], data[:, :, :, 1]


class DenseLayer:
    """KV of one layer, [B, H, seen, 2, D] in token order with the left padding, in a buffer that grows by half.

    clock: of all such layers; a lane's length counts its padding, and start is where that ends.
    """

    def __init__(self, number: int, clock: Clock) -> None:
        self.number, self.clock = number, clock
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.seen = 0
        self.left_pad: list[int] = []
        self.watched: Tensor | None = None
        self.scale = 0.0
        self._data: Tensor | None = None
        self._tickets = torch.empty(0, dtype=torch.int32)

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

    def token_bytes(self) -> int:
        """Bytes of KV of one token of one lane."""
        return 0 if self._data is None else self._data[0, :, :1].nbytes

    def host_bytes(self, lane: int | None = None) -> int:
        return 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, left_pad: list[int], how: Attention, fresh: bool) -> Tensor:
        """As FrozenLayer.attend."""
        steps = query.shape[2]
        if fresh:
            self.left_pad = left_pad
        if steps == 1 and self._data is not None:
            return self._step(query, key, value, how, fresh)
        if fresh:
            self._append(key, value)
            self.watched, self.scale = watch(self.watched, query), how.scale
        assert self._data is not None
        keys, values = self._data[:, :, : self.seen, 0], self._data[:, :, : self.seen, 1]
        if not any(self.left_pad):
            return causal_attention(query, keys, values, scale=how.scale, softcap=how.softcap, sinks=how.sinks)
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
        """Make room for one more token, so that a step is work of the device alone."""
        self._reserve(1)

    def due(self) -> bool:
        """Whether before_step() must be called again: the buffer is full."""
        return self._data is None or self._data.shape[2] <= self.seen

    def count_step(self) -> None:
        """Count a step of one token that the device took by itself."""
        self.seen += 1

    def tensors(self) -> list[Tensor]:
        """What a step reads and writes at fixed addresses."""
        return [] if self._data is None else [self._data, self._tickets]

    def tick(self, seen: int, coming: int | None = None) -> None:
        """Set the clock to the step whose newest token is the `seen`-th of the batch. There is no ring that `coming` could move."""
        assert self._data is not None
        self.clock.at((seen,) * self.lanes, tuple(self.left_pad), self._data.device)

    def _step(self, query: Tensor, key: Tensor, value: Tensor, how: Attention, fresh: bool) -> Tensor:
        """A single token: its key and value enter the buffer, its query attends, by device counters alone."""
        if fresh:
            if self.due():
                self.before_step()
            self.seen += 1
        self.tick(self.seen)
        assert self._data is not None
        out = sparse_decode(
            query[:, :, 0],
            self._data[:, :, :, 0],
            self._data[:, :, :, 1],
            scale=how.scale,
            newest=(key[:, :, -1], value[:, :, -1]),
            lengths=self.clock.length,
            starts=self.clock.start,
            softcap=how.softcap,
            sinks=how.sinks,
            tickets=self._tickets,
        )
        return out[:, :, None]

    def copy_from(self, other: FrozenKV | DenseLayer) -> None:
        """Take over the tokens of another layer."""
        if other.seen:
            self.left_pad, self.watched, self.scale = list(other.left_pad), other.watched, other.scale
            self._append(*padded(other))

    def join(self, others: Sequence[DenseLayer]) -> None:
        """Take over the tokens of other layers, their lanes one below the other, padded on the left to the longest."""
        keys, values, queries, pads = [], [], [], []
        longest = max(other.seen for other in others)
        for other in others:
            assert other.watched is not None
            more = longest - other.seen
            key, value = (F.pad(part, (0, 0, more, 0)) for part in padded(other))
            keys.append(key)
            values.append(value)
            queries.append(F.pad(other.watched, (0, 0, min(WATCHED, longest) - other.watched.shape[2], 0)))
            pads += [pad + more for pad in other.left_pad]
        self.left_pad, self.watched, self.scale = pads, torch.cat(queries), others[0].scale
        self._append(torch.cat(keys), torch.cat(values))

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
            self._tickets = self._tickets.new_zeros(self._data.shape[0] * self._data.shape[1])
            self.left_pad = [self.left_pad[lane] for lane in lanes]
            self.watched = None if self.watched is None else self.watched[lanes]

    def _append(self, key: Tensor, value: Tensor) -> None:
        batch, heads, steps, dim = key.shape
        if self._data is None:
            self._data = torch.empty((batch, heads, steps + max(256, steps // 16), 2, dim), dtype=key.dtype, device=key.device)
            self._tickets = torch.zeros(batch * heads, dtype=torch.int32, device=key.device)
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
