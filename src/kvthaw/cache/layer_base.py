"""What every kind of layer of a KV cache can do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kvthaw.cache.host_memory import HostMemory
from kvthaw.cache.sequences import Sequences
from kvthaw.cache.step import Row, Step
from kvthaw.cache.swapped import SwappedLayer
from kvthaw.kernels.dense import causal_attention
from kvthaw.kernels.places import Newest


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """How a layer of the model attends: softmax scale, Gemma's softcap, gpt-oss's sink logits [Hq]."""

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None

    def causal(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend from the last T tokens, query [B, Hq, T, D], causally to all n, keys and values [B, H, n, D]."""
        return causal_attention(query, keys, values, scale=self.scale, softcap=self.softcap, sinks=self.sinks)


@dataclass(frozen=True, slots=True)
class PrefillKV:
    """What a prefill leaves to be stored: keys, values [B, H, T, D]; of each sequence the last queries [Hq, W, D], and the rows
    [H, n, 2, D] that passed on the device, where the step's own are yet to be written."""

    step: Step
    keys: Tensor
    values: Tensor
    queries: Mapping[int, Tensor]
    passed: Mapping[int, Tensor]

    def of(self, row: Row) -> tuple[Tensor, Tensor]:
        """Return keys and values [H, n, D] of a row without its padding."""
        return self.keys[row.row, :, row.pad :], self.values[row.row, :, row.pad :]


class LayerKV(Protocol):
    """The keys and values of one layer, and attention over them.

    Shapes: query [B, Hq, T, D]; key, value [B, H, T, D], or of one row for a step of one sequence. A layer holds no lengths: they
    are in `sequences`, which the owner of all layers commits after the last layer. Until then every call may be repeated.
    """

    number: int
    sequences: Sequences
    scale: float
    recent_queries: dict[int, Tensor]
    """The last queries of each sequence's prompt, [Hq, W, D]."""

    def prefill(
        self, step: Step, query: Tensor, key: Tensor, value: Tensor, attention: AttentionParams
    ) -> tuple[Tensor, PrefillKV | None]:
        """Attend densely and causally from new tokens to all before them. Returns [B, Hq, T, D] and what KVCache is to store; None
        where the layer has."""

    def decode(self, step: Step, t: int, query: Tensor, newest: Newest, attention: AttentionParams) -> Tensor:
        """Attend from token t of the step, query [B, Hq, D], to what the layer's method selects, and store its key and value
        [B, H, D]. Returns [B, Hq, D]."""

    def attend_again(self, step: Step, query: Tensor, key: Tensor, value: Tensor, attention: AttentionParams) -> Tensor:
        """Attend with queries of the step's last tokens, from another layer that shares these keys. The layer has the keys."""

    def append(self, step: Step, query: Tensor, key: Tensor, value: Tensor) -> PrefillKV | None:
        """Take tokens as prefill() does, without attention. Returns what KVCache is to store; None where the layer has."""

    def before_step(self) -> None:
        """Run all host-side work that the next decode step requires, but for what leaves full rings; idempotent."""

    def nonfinite(self) -> Tensor | None:
        """Return [1] int32 on the device, 1 once a decoded key or value was not finite; None before the first prompt."""

    def rollback(self, failed: Step | None, *, repeated: bool = False, ahead: bool = False) -> None:
        """Return to the committed lengths: undo what a failed step wrote, unless the step is repeated, and what ran ahead, unless
        a decode step follows (ahead)."""

    def crop(self, seq: int, start: int, length: int, *, exactly: bool = False) -> None:
        """Drop the tokens >= length of a sequence; its ring begins at `start` from then on. exactly: an index that can undo its
        latest append does so instead of truncating."""

    def clear(self, seq: int) -> None:
        """Forget a sequence; no tensor moves."""

    @property
    def home(self) -> Any:
        """What holds its sequences, an object of its own for as long as none is allocated anew; None before the first prompt."""

    def swap_out(self, seq: int, memory: HostMemory) -> SwappedLayer:
        """Copy what the layer holds of a sequence to host memory. Raises HostMemoryError and CacheError; see kvthaw.cache.swap."""

    def swap_in(self, seq: int, swapped: SwappedLayer) -> None:
        """Restore what swap_out() returned into an empty sequence."""

    def reorder(self, sequences: Sequence[int]) -> None:
        """Sequence i becomes what sequence sequences[i] was."""

    def reset(self) -> None:
        """Forget everything."""

    def length(self, seq: int) -> int:
        """Return the counted tokens of a sequence, plus the tokens that a decode step has given this layer so far."""
        return self.sequences.length(seq)

    def read(self, seq: int, start: int, stop: int) -> Tensor:
        """Return rows [H, stop - start, 2, D] of a sequence, on the host or on the device."""

    def device_bytes(self) -> int:
        """Return the bytes of KV on the device."""

    def fixed_bytes(self) -> int:
        """Return the bytes that this layer takes on the device wherever its blocks lie, its index included."""

    def host_bytes(self, seq: int | None = None) -> int:
        """Return the bytes of KV on the host, of one sequence or of all."""

    def tensors(self) -> list[Tensor]:
        """Return the tensors that a captured step reads and writes."""


class DeviceLayer(LayerKV):
    """A layer whose KV stays on the device: nothing is offloaded, indexed or under way between its steps."""

    def fixed_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())


def attend_rows(step: Step, query: Tensor, attend: Callable[[Row, Tensor], Tensor]) -> Tensor:
    """Attend row by row: attend(row, q) returns the output for the queries q [1, Hq, n, D] of a row without its padding. query: of
    the step's last tokens."""
    if step.seq is not None:
        return attend(next(step.rows()), query)
    out = torch.zeros_like(query)
    for row in step.rows():
        one, pad = slice(row.row, row.row + 1), max(0, row.pad + query.shape[2] - step.tokens)
        out[one, :, pad:] = attend(row, query[one, :, pad:])
    return out


def last_queries(before: Tensor | None, query: Tensor, past: int, most: int | None) -> Tensor:
    """The last `most` queries of a sequence whose prompt came in parts, [Hq, W, D]; query [Hq, T, D]: the last part's, after `past`
    tokens. most None: all, but none from before tokens whose queries were not kept."""
    start = None if most is None else -most
    last = query[:, start:]
    if before is not None and (before.shape[1] < past if most is None else last.shape[1] >= most):
        before = None
    return last.clone() if before is None else torch.cat((before, last), dim=1)[:, start:].clone()


def take_queries(step: Step, query: Tensor, recent: dict[int, Tensor], most: int | None) -> dict[int, Tensor]:
    """Update `recent` with the last queries of each sequence and those of a step, [B, Hq, T, D]; see last_queries().

    Returns the step's own among them.
    """
    last = {}
    for row in step.rows():
        own = query[row.row, :, row.pad - step.tokens :]  # a clone has the last queries only
        kept = recent[row.seq] = last_queries(recent.get(row.seq), own, row.past, most)
        n = own.shape[1] if most is None else min(own.shape[1], most)
        last[row.seq] = kept[:, kept.shape[1] - n :]
    return last


def reordered(recent_queries: Mapping[int, Tensor], sequences: Sequence[int]) -> dict[int, Tensor]:
    """Return recent_queries after sequence i has become what sequence sequences[i] was."""
    return {i: recent_queries[seq] for i, seq in enumerate(sequences) if seq in recent_queries}
