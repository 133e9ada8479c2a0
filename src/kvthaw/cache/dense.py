"""A layer that keeps all of its KV on the device and attends to all of it: full attention, and the dense first layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from kvthaw.cache.clock import Clock
from kvthaw.cache.host import HostStore
from kvthaw.cache.lanes import Lanes, roomier
from kvthaw.kernels.decode_step import DecodeStep
from kvthaw.kernels.dense import causal_attention
from kvthaw.kernels.sparse_decode import sparse_decode

if TYPE_CHECKING:
    from kvthaw.cache.frozen import FrozenKV
    from kvthaw.cache.layer import Attention


WATCHED = 128
"""The prompt's last queries, which some indices look at."""


def watch(before: Tensor | None, query: Tensor) -> Tensor:
    """The last WATCHED queries of a lane whose prompt came in parts, [Hq, W, D]; query [Hq, T, D]: the last part's."""
    last = query[:, -WATCHED:]
    return last.clone() if before is None else torch.cat((before, last), dim=1)[:, -WATCHED:].clone()


def padded(layer: FrozenKV | DenseLayer) -> tuple[Tensor, Tensor, Tensor]:
    """All keys and values of a layer, [B, H, seen, D] each, on the device, zeros for the left padding; and before them the last
    queries of its prompts, [B, Hq, W, D], zeros before those of shorter ones."""
    some = next(iter(layer.watched.values()))
    queries, device = [layer.watched.get(lane, some[:, :0]) for lane in range(layer.lanes)], some.device
    width = max(q.shape[1] for q in queries)
    lanes = []
    for lane in range(layer.lanes):
        rows = layer.read(lane, 0, layer.length(lane)).to(device)
        lanes.append(F.pad(rows, (0, 0, 0, 0, layer.left_pad[lane], 0)))
    data = torch.stack(lanes)
    return torch.stack([F.pad(q, (0, 0, width - q.shape[1], 0)) for q in queries]), data[:, :, :, 0], data[:, :, :, 1]


class DenseLayer(Lanes):
    """KV of one layer, [B, H, capacity, 2, D], each lane's from its first token on, in a buffer that grows by half.

    clock: of all such layers. room: tokens a lane to make room for at once.
    """

    def __init__(self, number: int, clock: Clock) -> None:
        self.number, self.clock, self.room = number, clock, 0
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        Lanes.__init__(self)
        self.watched: dict[int, Tensor] = {}
        self.scale = 0.0
        self._data: Tensor | None = None
        self._offloaded: HostStore | None = None
        self._tickets = torch.empty(0, dtype=torch.int32)

    def read(self, lane: int, start: int, stop: int) -> Tensor:
        """Rows [H, stop - start, 2, D] of a lane, on the device."""
        assert self._data is not None
        return self._data[lane, :, start:stop]

    def nonfinite(self) -> Tensor | None:
        """As FrozenKV.nonfinite."""
        return self._tickets[-1:] if self._data is not None else None

    def device_bytes(self) -> int:
        """Bytes of KV on the device."""
        if self._data is None:
            return 0
        return self._data[0, :, 0].nbytes * sum(self.length(lane) for lane in range(self.lanes))

    def token_bytes(self) -> int:
        """Bytes of KV of one token of one lane."""
        return 0 if self._data is None else self._data[0, :, :1].nbytes

    def host_bytes(self, lane: int | None = None) -> int:
        """Bytes of KV on the host, of one lane or of all: what was offloaded for forks."""
        return 0 if self._offloaded is None else self._offloaded.nbytes(lane)

    def offloaded(self, extent: int) -> HostStore:
        """The rows of this layer on the host, as far as they fill extents of so many tokens, for forks to share: nobody ever writes
        into a full extent. They are copied once, for which this waits, and stay as long as this layer's rows do."""
        data = self._data
        assert data is not None
        store = self._offloaded
        if store is None or store.extent != extent:
            heads, dim = data.shape[1], data.shape[4]
            store = HostStore(self.lanes, heads, dim, data.dtype, extent=extent, pinned=data.is_cuda)
            self._offloaded = store
        for lane in range(self.lanes):
            have, full = store.length(lane), self.length(lane) // extent * extent
            if have < full:
                store.append(lane, data[lane, :, have:full], non_blocking=True)
        if data.is_cuda:
            torch.cuda.current_stream(data.device).synchronize()
        return store

    def attend(self, query: Tensor, key: Tensor, value: Tensor, left_pad: list[int], how: Attention, fresh: bool) -> Tensor:
        """As FrozenLayer.attend."""
        steps = query.shape[2]
        if fresh:
            self.left_pad = left_pad
        if steps == 1 and self._data is not None:
            return self._step(query, key, value, how, fresh)
        before = self.seen if fresh else self.seen - steps
        if self._data is None:
            self._begin(key, self.lanes, how.scale, self.coming)
        assert self._data is not None
        if fresh:
            if self.coming > steps:
                self._reserve(self.longest + self.coming)
            self.seen += steps
            self._reserve(self.longest)
        if not any(self.left_pad):
            if fresh:
                for lane in range(self.lanes):
                    self.watched[lane] = watch(self.watched.get(lane), query[lane])
                self._write(slice(None), before, key, value)
            keys, values = self._data[:, :, : self.seen, 0], self._data[:, :, : self.seen, 1]
            return causal_attention(query, keys, values, scale=how.scale, softcap=how.softcap, sinks=how.sinks)
        out = torch.zeros_like(query)
        for lane, left in enumerate(self.left_pad):
            pad = min(steps, max(0, left - before))
            if pad < steps:
                one = slice(lane, lane + 1)
                q, k, v = (x[one, :, pad:] for x in (query, key, value))
                out[one, :, pad:] = self._pass(lane, q, k, v, max(0, before - left), how, fresh)
        return out

    def fill(self, lane: int, query: Tensor, key: Tensor, value: Tensor, how: Attention) -> Tensor:
        """A dense pass of one lane, whose next tokens are given; see FrozenLayer.fill."""
        if self._data is None:
            self._begin(key, self.lanes, how.scale)
        past, steps = self.length(lane), query.shape[2]
        self._reserve(past + steps)
        return self._pass(lane, query, key, value, past, how, True)

    def clear(self, lane: int) -> None:
        """Forget the tokens of a lane."""
        self.watched.pop(lane, None)
        self._offloaded = None
        self._tickets.zero_()

    def recover(self) -> None:
        """See FrozenKV."""

    def before_step(self) -> None:
        """Make room for one more token, so that a step is work of the device alone."""
        self._reserve(self.longest + 1)

    def due(self) -> bool:
        """Whether before_step() must be called again: the buffer is full."""
        return self.capacity <= self.longest

    goes_ahead = True

    def go_ahead(self) -> None:
        """See FrozenLayer; nothing leaves a dense layer."""

    def catch_up(self) -> None:
        """See FrozenLayer."""

    def count_step(self) -> None:
        """Count a step of one token that the device took by itself."""
        self.count_token()

    def tensors(self) -> list[Tensor]:
        """What a step reads and writes at fixed addresses."""
        return [] if self._data is None else [self._data, self._tickets, *self.clock.tensors()]

    def tick(self, seen: int, coming: int | None = None) -> None:
        """Set the clock to the step whose newest token is the `seen`-th of the batch. There is no ring that `coming` could move."""
        assert self._data is not None
        lengths = tuple(seen - pad for pad in self.left_pad)
        self.clock.at(lengths, (0,) * self.lanes, self._data.device, self.live)

    def _step(self, query: Tensor, key: Tensor, value: Tensor, how: Attention, fresh: bool) -> Tensor:
        """A single token: its key and value enter the buffer, its query attends, by device counters alone."""
        if fresh:
            if self.due():
                self.before_step()
            self.count_token()
        self.tick(self.seen)
        assert self._data is not None
        step = DecodeStep(
            query[:, :, 0],
            self._data[:, :, :, 0],
            self._data[:, :, :, 1],
            scale=how.scale,
            newest=(key[:, :, -1], value[:, :, -1]),
            lengths=self.clock.length,
            softcap=how.softcap,
            sinks=how.sinks,
        )
        return sparse_decode(step, self._tickets)[:, :, None]

    def copy_from(self, other: FrozenKV | DenseLayer) -> None:
        """Take over the tokens of another layer."""
        if other.seen:
            _, key, value = padded(other)
            self.watched, self.seen, self.left_pad = dict(other.watched), other.seen, list(other.left_pad)
            self._begin(key, self.lanes, other.scale)
            self._reserve(self.longest)
            for lane, left in enumerate(self.left_pad):
                self._write(slice(lane, lane + 1), 0, key[lane : lane + 1, :, left:], value[lane : lane + 1, :, left:])

    def join(self, others: Sequence[DenseLayer]) -> None:
        """Take over the tokens of other layers, their lanes one below the other."""
        self._offloaded = None
        lanes = [(other, lane) for other in others for lane in range(other.lanes)]
        self.set_lengths([other.length(lane) for other, lane in lanes], ())
        self.watched = {i: other.watched[lane] for i, (other, lane) in enumerate(lanes) if lane in other.watched}
        for i, (other, lane) in enumerate(lanes):
            rows = other.read(lane, 0, other.length(lane))[None]
            if self._data is None:
                self._begin(rows[:, :, :, 0], len(lanes), other.scale)
                self._reserve(self.longest)
            self._write(slice(i, i + 1), 0, rows[:, :, :, 0], rows[:, :, :, 1])

    def check_crop(self, drop: int) -> None:
        """Nothing to refuse: all tokens are here."""

    def crop(self, drop: int) -> None:
        """Forget the last `drop` tokens of every lane."""
        if drop <= 0:
            return
        self._offloaded, self.era = None, object()
        self._tickets.zero_()
        self.seen = max(0, self.seen - drop)
        self.left_pad = [min(pad, self.seen) for pad in self.left_pad]
        if self.seen == 0:
            self.reset()

    def reorder(self, lanes: list[int]) -> None:
        """Lane i becomes what lane lanes[i] was."""
        self._offloaded, self.era = None, object()
        if self._data is not None:
            self._data = self._data[torch.tensor(lanes, device=self._data.device)]
            self._tickets = self._tickets.new_zeros(self._data.shape[0] * self._data.shape[1] + 1)
            self.left_pad = [self.left_pad[lane] for lane in lanes]
            self.watched = {i: self.watched[lane] for i, lane in enumerate(lanes) if lane in self.watched}

    def _pass(self, lane: int, query: Tensor, key: Tensor, value: Tensor, past: int, how: Attention, fresh: bool) -> Tensor:
        """Causal attention of one lane's tokens [1, ., T, D], of which `past` came before; fresh: they enter the buffer first."""
        assert self._data is not None
        one, length = slice(lane, lane + 1), past + query.shape[2]
        if fresh:
            self.watched[lane] = watch(self.watched.get(lane), query[0])
            self._write(one, past, key, value)
        keys, values = self._data[one, :, :length, 0], self._data[one, :, :length, 1]
        return causal_attention(query, keys, values, scale=how.scale, softcap=how.softcap, sinks=how.sinks)

    def _write(self, lanes: slice, at: int, key: Tensor, value: Tensor) -> None:
        assert self._data is not None
        end = at + key.shape[2]
        self._data[lanes, :, at:end, 0] = key
        self._data[lanes, :, at:end, 1] = value

    def _begin(self, key: Tensor, lanes: int, scale: float, tokens: int = 0) -> None:
        """A buffer for the keys [., H, T, D] of a first prompt, or of its beginning if it has more tokens."""
        _, heads, steps, dim = key.shape
        self.scale = scale
        self.capacity = self.room or roomier(0, max(tokens, steps))
        self._data = torch.zeros((lanes, heads, self.capacity, 2, dim), dtype=key.dtype, device=key.device)
        self._tickets = torch.zeros(lanes * heads + 1, dtype=torch.int32, device=key.device)

    def _reserve(self, tokens: int) -> None:
        """Room for so many tokens a lane."""
        assert self._data is not None
        if tokens > self.capacity:
            batch, heads, have, _, dim = self._data.shape
            self.capacity = roomier(have, tokens)
            grown = self._data.new_zeros((batch, heads, self.capacity, 2, dim))
            grown[:, :, :have] = self._data
            self._data = grown
