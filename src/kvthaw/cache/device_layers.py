"""Layers whose KV stays on the device: all of it, which every step attends to, or the tokens of a sliding window."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from kvthaw.cache.device_memory import DeviceMemory
from kvthaw.cache.host import HostStore
from kvthaw.cache.host_memory import Block
from kvthaw.cache.layer_base import AttentionParams, LayerKV, LayerShape, LayerState, RecentQueries, attend_rows
from kvthaw.cache.pool import Slab
from kvthaw.cache.sequences import Sequences
from kvthaw.cache.step import Moves, Row, Step
from kvthaw.errors import CacheError
from kvthaw.kernels.decode_step import DecodeStep, InSlab, TokenOrder
from kvthaw.kernels.local import Span, local_attention
from kvthaw.kernels.places import Newest
from kvthaw.kernels.row_format import RowFormat
from kvthaw.kernels.sparse_decode import sparse_decode
from kvthaw.regions import Regions

_BLOCK = 1024  # tokens of a block in host memory


class DeviceLayer(LayerKV):
    """A layer whose KV stays on the device. Nothing is offloaded or indexed, and no work runs between its steps."""

    def attend_dense(self, step: Step, query: Tensor, key: Tensor, value: Tensor, attention: AttentionParams) -> Tensor:
        """Attend sequence by sequence from the last tokens of a dense step, which the layer may have stored already."""
        raise NotImplementedError

    def attend_again(self, step: Step, query: Tensor, key: Tensor, value: Tensor, attention: AttentionParams) -> Tensor:
        if step.dense:
            return self.attend_dense(step, query, key, value, attention)
        self.sequences.place_again(step, query.device)
        return self.decode(step, 0, query[:, :, 0], (key[:, :, -1], value[:, :, -1]), attention)[:, :, None]

    def nonfinite(self) -> Tensor | None:
        tensors = self.tensors()
        return tensors[1][:, 0] if tensors else None

    def fixed_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())


class DenseLayer(DeviceLayer):
    """KV of one layer, [B, H, capacity, 2, D], by position; see LayerKV. Tokens behind a sequence's length are never read."""

    attends_to_all = True

    def __init__(self, number: int, sequences: Sequences, memory: DeviceMemory, prompt_queries: int | None) -> None:
        self.number, self.sequences, self.memory, self.prompt_queries = number, sequences, memory, prompt_queries
        self.reset()

    def reset(self) -> None:
        self.recent_queries = RecentQueries(self.prompt_queries)
        self.scale = 0.0
        self._data = torch.empty((0, 0, 0, 2, 0))
        self._offloaded: HostStore | None = None
        self._tickets = torch.empty((0, 1), dtype=torch.int32)

    @property
    def _allocated(self) -> bool:
        return self._data.numel() > 0

    # Reading

    def read(self, seq: int, start: int, stop: int) -> Tensor:
        return self._data[seq, :, start:stop]

    def device_bytes(self) -> int:
        return self.token_bytes() * sum(self.sequences.length(seq) for seq in range(self.sequences.count))

    def token_bytes(self) -> int:
        """Return the bytes of KV of one token of one sequence."""
        return self._data.shape[1] * 2 * self._data.shape[4] * self._data.itemsize

    def host_bytes(self, seq: int | None = None) -> int:
        """Return the bytes of KV that were copied to the host for forks."""
        return 0 if self._offloaded is None else self._offloaded.nbytes(seq)

    def tensors(self) -> list[Tensor]:
        return [self._data, self._tickets] if self._allocated else []

    def offloaded(self, block_size: int, format: RowFormat) -> HostStore:
        """Return a host store with the full blocks, which forks share, until this layer's rows change. Waits for the copies."""
        data, store = self._data, self._offloaded
        if store is None or (store.block_size, store.format) != (block_size, format):
            count, (heads, dim), pinned = self.sequences.count, (data.shape[1], data.shape[4]), data.is_cuda
            store = HostStore(count, heads, dim, data.dtype, block_size=block_size, pinned=pinned, format=format)
            self._offloaded = store
        for seq in range(self.sequences.count):
            have, full = store.length(seq), self.sequences.length(seq) // block_size * block_size
            if have < full:
                store.append(seq, data[seq, :, have:full], non_blocking=True)
        if data.is_cuda:
            torch.cuda.current_stream(data.device).synchronize()
        return store

    # Steps

    def prefill(self, step: Step, query: Tensor, key: Tensor, value: Tensor, attention: AttentionParams) -> tuple[Tensor, None]:
        data = self._write(step, query, key, value, attention.scale)
        if not (step.parts or any(step.left_pad)):
            return _causal(query, data[:, :, : step.start + step.tokens], attention), None
        if step.packs(query.shape[2]):
            return attention.packed(query, key, value, step), None
        return self.attend_dense(step, query, key, value, attention), None

    def attend_dense(self, step: Step, query: Tensor, key: Tensor, value: Tensor, attention: AttentionParams) -> Tensor:
        def attend(row: Row, q: Tensor) -> Tensor:
            return _causal(q, self._data[row.seq : row.seq + 1, :, : row.length], attention)

        return attend_rows(step, query, attend)

    def decode(self, step: Step, t: int, query: Tensor, newest: Newest, attention: AttentionParams) -> Tensor:
        """Attend to everything, with a kernel that reads only device counters."""
        self._make_room()
        keys, values = self._data[: len(query)].unbind(3)
        lengths = self.sequences.on_device.lengths[: len(query)]
        decode_step = DecodeStep(query, keys, values, scale=attention.scale, softcap=attention.softcap, sinks=attention.sinks)
        return sparse_decode(decode_step, TokenOrder(lengths, newest), self._tickets)

    def append(self, step: Step, query: Tensor, key: Tensor, value: Tensor) -> None:
        self._write(step, query, key, value, self.scale)

    def _write(self, step: Step, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Write the step's tokens to their positions and return all data."""
        if not self._allocated:
            self._allocate(key, len(step.left_pad), scale)
        self._make_room()
        self.recent_queries.take(step, query)
        data = self._data
        if not (step.parts or any(step.left_pad)):
            place = data[:, :, step.start : step.start + step.tokens]
            place[:, :, :, 0], place[:, :, :, 1] = key, value
            return data
        for row in step.rows():
            place = data[row.seq, :, row.past : row.length]
            place[:, :, 0], place[:, :, 1] = key[row.row, :, row.places], value[row.row, :, row.places]
        return data

    def _allocate(self, key: Tensor, count: int, scale: float) -> None:
        _, heads, _, dim = key.shape
        self.scale = scale
        self._data = self._zeros((count, heads, self.sequences.capacity, 2, dim), key.dtype, key.device)
        self._tickets = torch.zeros((count, 1 + heads), dtype=torch.int32, device=key.device)

    def _make_room(self) -> None:
        """Grow the tensor to the capacity of the sequences."""
        data = self._data
        have, capacity = data.shape[2], self.sequences.capacity
        if have < capacity:
            grown = self._zeros((*data.shape[:2], capacity, *data.shape[3:]), data.dtype, data.device)
            grown[:, :, :have] = data
            self._data = grown

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.memory.allocate(device, partial(_zeros, shape, dtype, device))

    # Between steps

    def before_step(self) -> None:
        if self._allocated:
            self._make_room()

    def rollback(self, failed: Step | None, *, ahead: bool = False) -> None:
        if failed is not None:
            self.recent_queries.rollback(failed)

    def crop(self, seq: int, start: int, length: int, *, exactly: bool = False) -> None:
        self._offloaded = None
        self._tickets.zero_()

    def clear(self, seq: int) -> None:
        self.recent_queries.pop(seq, None)
        self._offloaded = None

    def state(self, seq: int) -> LayerState:
        rows = self.read(seq, 0, self.sequences.length(seq))
        blocks = [Block(part, on_device=True).share() for part in rows.split(_BLOCK, dim=1)]
        return LayerState(blocks, rows.shape[1], queries=self.recent_queries.get(seq))

    def load(self, seq: int, state: LayerState, start: int) -> None:
        at = 0
        for block in state.blocks:
            rows = block.data[:, : state.stored - at]
            if state.format is not None and rows.dtype != self._data.dtype:
                rows = state.format.decode(rows.to(self._data.device, non_blocking=True))
            self._data[seq, :, at : at + rows.shape[1]].copy_(rows, non_blocking=True)
            at += rows.shape[1]
        if state.queries is not None:
            self.recent_queries[seq] = state.queries.to(self._data.device)

    def copy_slots(self, moves: Moves) -> None:
        moves.copy(self._tickets)
        for seq, to in moves.slots.items():  # one by one: together they would take memory
            length = self.sequences.length(seq)
            self._data[to, :, :length].copy_(self._data[seq, :, :length])

    def move(self, moves: Moves) -> None:
        self._offloaded = None
        self.recent_queries.move(moves)

    def prepare(self, step: Step, shape: LayerShape) -> None:
        if not self._allocated:
            self._allocate(shape.keys, len(step.left_pad), shape.scale)
        self._make_room()
        self.recent_queries.begin(step)

    def copy_from(self, other: Self) -> None:
        data = other._data
        self.scale, self._tickets = other.scale, other._tickets.clone()
        self._data = self._zeros(tuple(data.shape), data.dtype, data.device).copy_(data)
        self.recent_queries.replace(other.recent_queries)

    def reorder(self, sequences: Sequence[int]) -> None:
        self._offloaded = None
        if self._allocated:
            order = torch.tensor(sequences, device=self._data.device)
            self._data, self._tickets = self._data[order], self._tickets[order]
            self.recent_queries.reorder(sequences)


def _causal(query: Tensor, data: Tensor, attention: AttentionParams) -> Tensor:
    """Return the causal attention of the last tokens to data [B, H, n, 2, D]."""
    return attention.causal(query, data[:, :, :, 0], data[:, :, :, 1])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros. On a CPU the system maps pages on first write, so unused capacity costs no time."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size, aligned = math.prod(shape) * dtype.itemsize, 64  # bytes, as torch's own
    data = torch.from_numpy(np.zeros(size + aligned, dtype=np.uint8))
    return data[-data.data_ptr() % aligned :][:size].view(dtype).view(shape)


class WindowLayer(DeviceLayer):
    """KV of the last tokens of each sequence in a ring; see LayerKV. Cannot be cropped.

    Before a prefill overwrites a ring, its content is saved until the next prefill. A failed prefill is rolled back from
    it, and layers that share the keys attend to it.

    leader: the first layer of the cache with this span, which computes the start of the spans in a decode step. None: this
        one.
    """

    keeps_all = False

    def __init__(self, number: int, sequences: Sequences, span: Span, leader: WindowLayer | None = None) -> None:
        self.number, self.sequences, self.span, self.leader = number, sequences, span, leader
        self.reset()

    def reset(self) -> None:
        self.recent_queries = RecentQueries(0)  # none: no index is built
        self.scale = 0.0
        self.slab = Slab(0, 0, 0, Regions(0, 1, 1), 0, dtype=torch.float32, device=torch.device("cpu"))
        self._starts = torch.empty(0, dtype=torch.int32)
        self._before: tuple[Step | None, dict[int, Tensor]] = None, {}

    @property
    def _allocated(self) -> bool:
        return len(self.slab.data) > 0

    # Reading

    def read(self, seq: int, start: int, stop: int) -> Tensor:
        """Read rows; see LayerKV. Only positions that the next query attends to are available."""
        return self.slab.read(seq, start, stop)

    def device_bytes(self) -> int:
        return self.slab.data.nbytes

    def host_bytes(self, seq: int | None = None) -> int:
        """Return 0: nothing is on the host."""
        return 0

    def tensors(self) -> list[Tensor]:
        return self.slab.tensors() if self._allocated else []

    # Steps

    def prefill(self, step: Step, query: Tensor, key: Tensor, value: Tensor, attention: AttentionParams) -> tuple[Tensor, None]:
        self._allocate(step, key, attention.scale)
        self._before = step, {row.seq: self.slab.data[row.seq].clone() for row in step.rows() if row.past}
        out = self.attend_dense(step, query, key, value, attention)
        self.append(step, query, key, value)
        return out, None

    def decode(self, step: Step, t: int, query: Tensor, newest: Newest, attention: AttentionParams) -> Tensor:
        """Attend to the span; see LayerKV. The kernel reads only device counters."""
        lengths, slab, own = self.sequences.on_device.lengths, self.slab, slice(len(query))
        if self.leader is None:
            self._starts = self.span.firsts(lengths - 1)
        places = InSlab(slab.regions, lengths[own], (self.leader or self)._starts[own], newest)
        how: dict[str, Any] = {"scale": attention.scale, "softcap": attention.softcap, "sinks": attention.sinks}
        return sparse_decode(DecodeStep(query, slab.keys[own], slab.values[own], **how), places, slab.tickets)

    def append(self, step: Step, query: Tensor, key: Tensor, value: Tensor) -> None:
        for row in step.rows():
            new = torch.stack((key[row.row, :, row.places], value[row.row, :, row.places]), dim=2)[:, -self.slab.regions.ring :]
            self.slab.write(row.seq, row.length - new.shape[1], new)

    def attend_dense(self, step: Step, query: Tensor, key: Tensor, value: Tensor, attention: AttentionParams) -> Tensor:
        def attend(row: Row, q: Tensor) -> Tensor:
            new = torch.stack((key[row.row, :, row.places], value[row.row, :, row.places]), dim=2)
            first = self.span.first(row.past)
            if first < row.past:
                before = self._before[1][row.seq]  # as the ring was before the latest prefill
                past = [before[:, place:end] for place, end in self.slab.runs(first, row.past)]
                new = torch.cat((*past, new), dim=1)
            keys, values = new[None, :, :, 0], new[None, :, :, 1]
            return local_attention(
                q, keys, values, first, self.span, scale=attention.scale, softcap=attention.softcap, sinks=attention.sinks
            )

        return attend_rows(step, query, attend)

    def _allocate(self, step: Step, key: Tensor, scale: float) -> None:
        if not self._allocated:
            _, heads, _, dim = key.shape
            most = self.span.size if self.sequences.limit is None else min(self.span.size, self.sequences.limit)
            regions = Regions(0, most, 1)
            self.scale = scale
            self.slab = Slab(len(step.left_pad), heads, dim, regions, 0, dtype=key.dtype, device=key.device)

    # Between steps

    def before_step(self) -> None:
        """Do nothing: new tokens overwrite tokens that leave the ring."""

    def rollback(self, failed: Step | None, *, ahead: bool = False) -> None:
        """Roll back a prefill; see LayerKV. A decoded token needs none: no later query attends to the token that it overwrote."""
        if failed is not None and self._before[0] is failed:
            for seq, data in self._before[1].items():
                self.slab.data[seq].copy_(data)
            self._before = None, {}

    def crop(self, seq: int, start: int, length: int, *, exactly: bool = False) -> None:
        """Raise CacheError: overwritten tokens cannot be restored."""
        raise CacheError(f"layer {self.number} keeps {self.span.size} tokens; it cannot be cropped")

    def clear(self, seq: int) -> None:
        """Zero the ring, since its content may not have been finite; see LayerKV."""
        if self._allocated:
            self.slab.data[seq].zero_()
            self._before[1].pop(seq, None)

    def state(self, seq: int) -> LayerState:
        return LayerState(held=self.slab.data[seq])

    def load(self, seq: int, state: LayerState, start: int) -> None:
        assert state.held is not None, "a window's KV is not in blocks"
        self.slab.data[seq].copy_(state.held)

    def copy_slots(self, moves: Moves) -> None:
        moves.copy(self.slab.data)
        moves.copy(self.slab.tickets)

    def move(self, moves: Moves) -> None:
        self._before = None, {}  # no prefill can fail any more

    def prepare(self, step: Step, shape: LayerShape) -> None:
        self._allocate(step, shape.keys, shape.scale)

    def copy_from(self, other: Self) -> None:
        self.scale, self.slab, self._before = other.scale, copy.deepcopy(other.slab), other._before

    def reorder(self, sequences: Sequence[int]) -> None:
        if self._allocated:
            self.slab.reorder(torch.tensor(sequences, device=self.slab.data.device))
            self._before = None, {}
