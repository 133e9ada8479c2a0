"""A layer that attends only to recent tokens (sliding-window or chunked attention): a ring on the device for each sequence."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from kvthaw.cache.layer_base import AttentionParams, DeviceLayer, LayerShape, RecentQueries, attend_rows
from kvthaw.cache.pool import Slab
from kvthaw.cache.sequences import Sequences
from kvthaw.cache.state import LayerState
from kvthaw.cache.step import Row, Step
from kvthaw.errors import CacheError
from kvthaw.kernels.decode_step import DecodeStep, InSlab
from kvthaw.kernels.local import Span, local_attention
from kvthaw.kernels.places import Newest
from kvthaw.kernels.sparse_decode import sparse_decode
from kvthaw.regions import Regions


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

    def nonfinite(self) -> Tensor | None:
        return self.slab.tickets[:, 0] if self._allocated else None

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

    def prepare(self, step: Step, shape: LayerShape) -> None:
        self._allocate(step, shape.keys, shape.scale)

    def copy_from(self, other: Self) -> None:
        self.scale, self.slab, self._before = other.scale, copy.deepcopy(other.slab), other._before

    def reorder(self, sequences: Sequence[int]) -> None:
        if self._allocated:
            self.slab.reorder(torch.tensor(sequences, device=self.slab.data.device))
            self._before = None, {}
