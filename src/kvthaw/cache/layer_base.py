"""The interface of every kind of layer of a KV cache, and what a layer has of a sequence, as a value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from kvthaw.cache.host_memory import Block, HostMemory
from kvthaw.cache.sequences import Sequences
from kvthaw.cache.step import Moves, Row, Step
from kvthaw.config import KvDtype
from kvthaw.kernels.dense import causal_attention, continued, packed_attention
from kvthaw.kernels.places import Newest
from kvthaw.kernels.row_format import RowFormat, row_format


@dataclass(frozen=True, slots=True)
class IndexState:
    """An index's state of one sequence, which covers positions first .. end.

    held: what Index.export() returned, or its tensors from a file.
    """

    held: Any
    first: int
    end: int

    def nbytes(self) -> int:
        """Return the bytes of host memory, including bytes shared with a sequence."""
        if isinstance(self.held, Mapping):
            return sum(tensor.nbytes for tensor in self.held.values())
        nbytes: int = self.held.nbytes()
        return nbytes


@dataclass(frozen=True, slots=True)
class LayerState:
    """State of one sequence in one layer, where it lies or in host memory. It is an owner of its blocks until release().

    blocks: its stored rows in token order.
    stored: number of these rows.
    format: how the blocks hold them; None: as the layer does.
    held: its sink and ring; None: they hold rows of the blocks.
    queries: the last queries of its prompt, [Hq, W, D].
    index: None: the index is built from the rows.
    """

    blocks: Sequence[Block] = ()
    stored: int = 0
    format: RowFormat | None = None
    held: Tensor | None = None
    queries: Tensor | None = None
    index: IndexState | None = None

    def on_host(self, memory: HostMemory) -> LayerState:
        """Return this state in host memory, and release this one. Copies are only enqueued. Raises HostMemoryError."""
        try:
            blocks = [block.copied(memory) if block.on_device else block for block in self.blocks]
            blocks = [block.share() for block in blocks]
        finally:
            self.release()
        held = None if self.held is None else self.held.to("cpu", copy=True)
        return replace(self, blocks=blocks, held=held, queries=None if self.queries is None else self.queries.cpu())

    def release(self) -> None:
        """Release the blocks."""
        for block in self.blocks:
            block.release()


@dataclass(frozen=True, slots=True)
class SequenceState:
    """A sequence in host memory: its length, where its ring begins, and its state in each layer.

    home: the layers in force when it was exported, to which it must return.
    nonfinite: numbers of the layers whose keys or values were not finite.
    states: state of layers that kvthaw does not serve.
    """

    length: int
    ring_start: int
    layers: Sequence[LayerState]
    home: tuple[object, ...]
    nonfinite: Sequence[int] = ()
    states: dict[Any, Tensor] = field(default_factory=dict)

    def host_bytes(self) -> int:
        """Return the bytes of its KV in host memory, including blocks shared with a prefix cache."""
        return sum(block.data.nbytes for layer in self.layers for block in layer.blocks)

    def release(self) -> None:
        """Release all blocks."""
        for layer in self.layers:
            layer.release()


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """How a layer of the model attends: softmax scale, Gemma's softcap, gpt-oss's sink logits [Hq].

    flash4: prompts attend by FlashAttention 4.
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    flash4: bool = False

    def causal(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend from the last T tokens, query [B, Hq, T, D], causally to all n, keys and values [B, H, n, D]."""
        return causal_attention(query, keys, values, **self._all())

    def continued(self, query: Tensor, keys: Tensor, values: Tensor, past: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """Attend from T tokens causally to themselves, all [B, heads, T, D], and to all of `past`, part by part."""
        return continued(query, keys, values, past, **self._all())

    def packed(self, query: Tensor, keys: Tensor, values: Tensor, step: Step) -> Tensor:
        """Attend from the prompts of several sequences, one after the other in one row, each causally to itself."""
        lengths = [tokens for _, tokens in step.parts]
        return packed_attention(query, keys, values, lengths, step.ends(query.device), **self._all())

    def _all(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class PrefillKV:
    """KV of a prefill that is yet to be stored.

    keys, values: [B, H, T, D].
    queries: the last queries of each sequence, [Hq, W, D].
    passed: by sequence, earlier rows [H, n, 2, D] that attention read on the device, with space for the step's own.
    """

    step: Step
    keys: Tensor
    values: Tensor
    queries: Mapping[int, Tensor]
    passed: Mapping[int, Tensor]


class RecentQueries(dict[int, Tensor]):
    """The last queries of each sequence's prompt, [Hq, W, D]. A sequence whose first tokens were decode steps has none.

    most: how many are kept; None: all, except queries before tokens whose queries were not kept.
    """

    def __init__(self, most: int | None) -> None:
        super().__init__()
        self.most = most
        self._before: tuple[Step | None, dict[int, Tensor]] = None, {}  # the latest prefill, and the queries before it

    def begin(self, step: Step) -> None:
        """Remember the queries before a step, for rollback()."""
        self._before = step, dict(self)

    def rollback(self, step: Step) -> bool:
        """Restore the queries from before a step. Returns whether it was the latest that begin() was called for."""
        latest, before = self._before
        if latest is not step:
            return False
        self._before = None, {}
        self.replace(before)
        return True

    def take(self, step: Step, query: Tensor) -> dict[int, Tensor]:
        """Keep the last queries of a step, [B, Hq, T, D]. Returns the kept ones of the step itself."""
        self.begin(step)
        last, before = dict[int, Tensor](), step.tokens - query.shape[2]  # a clone has the last queries only
        if self.most is not None and step.packs(query.shape[2]):  # two launches for each number of queries
            parts = {row.seq: query[0, :, max(row.start, row.stop - self.most) : row.stop] for row in step.rows()}
            for width in {part.shape[1] for part in parts.values()}:
                some = [seq for seq, part in parts.items() if part.shape[1] == width]
                whole = torch.stack([parts[seq] for seq in some])
                last.update((seq, torch.empty_like(one)) for seq, one in zip(some, whole, strict=True))  # memory of its own
                torch._foreach_copy_([last[seq] for seq in some], whole.unbind())
            self.update(last)
            return last
        for row in step.rows():
            own = query[row.row, :, max(0, row.start - before) : max(0, row.stop - before)]
            kept = self[row.seq] = self._last(row, own)
            n = own.shape[1] if self.most is None else min(own.shape[1], self.most)
            last[row.seq] = kept[:, kept.shape[1] - n :]
        return last

    def _last(self, row: Row, query: Tensor) -> Tensor:
        """Return the last queries [Hq, W, D] of a sequence; query [Hq, T, D] is the last part of its prompt."""
        before, start = self.get(row.seq), None if self.most is None else -self.most
        last = query[:, start:]
        if before is not None and (before.shape[1] < row.past if self.most is None else last.shape[1] >= self.most):
            before = None
        return last.clone() if before is None else torch.cat((before, last), dim=1)[:, start:].clone()

    def move(self, moves: Moves) -> None:
        """Move the queries of sequences to empty slots."""
        for seq, to in moves.slots.items():
            if seq in self:
                self[to] = self.pop(seq)

    def reorder(self, sequences: Sequence[int]) -> None:
        """Replace sequence i by the former sequence sequences[i]."""
        self.replace({i: self[seq] for i, seq in enumerate(sequences) if seq in self})

    def replace(self, known: Mapping[int, Tensor]) -> None:
        """Keep these queries instead."""
        self.clear()
        self.update(known)


class LayerKV(Protocol):
    """The keys and values of one layer, and attention over them.

    Shapes: query [B, Hq, T, D]; key, value [B, H, T, D]. B is 1 for a step of one sequence. Layers hold no lengths:
    `sequences` does, and the owner of all layers commits them after the last layer. Until then every call may be repeated.

    A kind of layer inherits from this class and overrides every method except begin, export, length, queries and take.
    `make_layers` (`cache/chooser.py`) makes the layers of a cache.
    """

    number: int
    sequences: Sequences
    scale: float
    recent_queries: RecentQueries
    attends_to_all: bool = False
    """Whether every step attends to all tokens."""
    keeps_all: bool = True
    """Whether read() has all tokens. A cache with other layers cannot be cropped, forked or saved."""

    def prefill(
        self, step: Step, query: Tensor, key: Tensor, value: Tensor, attention: AttentionParams
    ) -> tuple[Tensor, PrefillKV | None]:
        """Attend densely and causally from new tokens to all tokens up to each.

        Returns [B, Hq, T, D], and the KV that KVCache must store; None if the layer has stored it.
        """

    def decode(self, step: Step, t: int, query: Tensor, newest: Newest, attention: AttentionParams) -> Tensor:
        """Attend from token t of the step to the tokens that the method selects, and store its key and value.

        `sequences` has the device's lengths at this token (`Sequences.place`).

        query: [B, Hq, D].
        newest: key and value of the token, [B, H, D] each.

        Returns [B, Hq, D].
        """

    def attend_again(self, step: Step, query: Tensor, key: Tensor, value: Tensor, attention: AttentionParams) -> Tensor:
        """Attend with queries of the step's last tokens, by another layer that shares the keys. The layer has these already."""

    def append(self, step: Step, query: Tensor, key: Tensor, value: Tensor) -> PrefillKV | None:
        """Append tokens as prefill() does, without attention. Returns what prefill() returns second."""

    def before_step(self) -> None:
        """Run all host-side work that the next decode step needs, except for full rings. Idempotent."""

    def nonfinite(self) -> Tensor | None:
        """Return flags [B] int32 on the device, 1 once a key or value of a sequence was not finite; None before the first prompt.

        A layer with all KV on the device leaves out prompts.
        """

    def rollback(self, failed: Step | None, *, ahead: bool = False) -> None:
        """Return to the committed lengths. Undo what a failed step wrote, and what ran ahead of a step.

        ahead: a decode step follows, so keep what ran ahead of it.
        """

    def crop(self, seq: int, start: int, length: int, *, exactly: bool = False) -> None:
        """Drop the tokens >= length of a sequence; its ring begins at `start` from then on.

        exactly: an index that can undo its latest append does so instead of truncating.
        """

    def clear(self, seq: int) -> None:
        """Drop a sequence. No tensor moves."""

    def state(self, seq: int) -> LayerState:
        """Return the rows and the queries of a sequence where they lie, as views. Its index is left out."""

    def export(self, seq: int, memory: HostMemory) -> LayerState:
        """Copy a sequence's state to host memory. Raises HostMemoryError, and CacheError if its index cannot be exported."""
        return self.state(seq).on_host(memory)

    def load(self, seq: int, state: LayerState, start: int) -> None:
        """Load a state into an empty sequence, whose ring begins at `start` from then on."""

    def take(self, seq: int, other: Self, own: int) -> None:
        """Copy sequence `own` of another layer, without its index, into an empty sequence. Blocks are shared."""
        state = other.state(own)
        self.load(seq, state, 0)
        state.release()

    def copy_slots(self, moves: Moves) -> None:
        """Copy what the device has of decoding sequences to empty slots, in a layer without an index. May be repeated."""

    def move(self, moves: Moves) -> None:
        """Move what the host knows of these sequences. Allocates nothing."""

    def prepare(self, step: Step, shape: LayerShape) -> None:
        """Allocate the layer if it is not allocated, for a step whose tokens are loaded instead of prefilled."""

    def begin(self, step: Step, shape: LayerShape, states: Mapping[int, LayerState]) -> None:
        """Start sequences with states of the step's tokens, as a prefill of these would."""
        self.prepare(step, shape)
        for row in step.rows():
            self.recent_queries[row.seq] = shape.queries[0]  # unless the state knows some
            self.load(row.seq, states[row.seq], self.sequences.regions.first_indexed(row.stop - row.start))

    def copy_from(self, other: Self) -> None:
        """Copy the committed tokens of an equal layer of another cache into this empty one. Blocks are shared."""

    def reorder(self, sequences: Sequence[int]) -> None:
        """Replace sequence i by the former sequence sequences[i]."""

    def reset(self) -> None:
        """Drop everything."""

    def queries(self, seq: int) -> Tensor:
        """Return the last queries of a sequence's prompt, [Hq, W, D], with W = 0 if there are none."""
        known = self.recent_queries.get(seq)
        return next(iter(self.recent_queries.values()))[:, :0] if known is None else known

    def length(self, seq: int) -> int:
        """Return the committed tokens of a sequence, plus the tokens that a decode step has given this layer so far."""
        return self.sequences.length(seq)

    def read(self, seq: int, start: int, stop: int) -> Tensor:
        """Return rows [H, stop - start, 2, D] of a sequence, on the host or on the device."""

    def device_bytes(self) -> int:
        """Return the bytes of KV on the device."""

    def fixed_bytes(self) -> int:
        """Return the bytes that this layer takes on the device without its blocks, its index included."""

    def host_bytes(self, seq: int | None = None) -> int:
        """Return the bytes of KV on the host, of one sequence or of all."""

    def tensors(self) -> list[Tensor]:
        """Return the tensors that a captured step reads and writes."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What is needed to allocate a layer.

    queries, keys: [1, Hq, 0, D] and [1, H, 0, D], of its device and dtype.
    scale: its softmax scale.
    format: how blocks hold its rows.
    """

    queries: Tensor
    keys: Tensor
    scale: float
    format: RowFormat

    @classmethod
    def of(cls, layer: LayerKV, seq: int, kv_dtype: KvDtype | None) -> LayerShape:
        """Return the shape of a layer after the prompt of a sequence."""
        queries = layer.queries(seq)[None, :, :0]
        keys = layer.read(seq, 0, 0)[None, :, :, 0].to(queries.device)
        return cls(queries, keys, layer.scale, row_format(kv_dtype, keys.shape[3], keys.dtype))

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of a block of KV."""
        return self.keys.shape[1] * block_size * self.format.row_bytes

    def block(self, block_size: int, memory: HostMemory) -> Block:
        """Return an uninitialised block in host memory. Raises HostMemoryError."""
        return self.blocks(1, block_size, memory)[0]

    def blocks(self, count: int, block_size: int, memory: HostMemory) -> list[Block]:
        """Return uninitialised blocks in host memory. Raises HostMemoryError. Threads may pin theirs at the same time."""
        shape = self.keys.shape[1], block_size, *self.format.tail
        return list(map(Block, memory.allocate_all(count, shape, self.format.stored, pinned=self.keys.is_cuda)))


def attend_rows(step: Step, query: Tensor, attend: Callable[[Row, Tensor], Tensor]) -> Tensor:
    """Attend sequence by sequence: attend(row, q) returns the output for the queries q [1, Hq, n, D] of its new tokens.

    query: queries of the step's last tokens.
    """
    if len(step.parts) == 1:
        return attend(next(step.rows()), query)
    out, before = torch.zeros_like(query), step.tokens - query.shape[2]
    for row in step.rows():
        one, places = slice(row.row, row.row + 1), slice(max(0, row.start - before), max(0, row.stop - before))
        out[one, :, places] = attend(row, query[one, :, places])
    return out
