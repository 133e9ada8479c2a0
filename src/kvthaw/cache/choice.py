"""What a decode step of a layer group attends to: choices, their checks, and buffers for choices made on the host."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvthaw.cache.host_memory import host_tensor
from kvthaw.cache.index_api import IndexContext, Selection
from kvthaw.errors import CacheError


@dataclass(frozen=True, slots=True)
class Choice:
    """The rows that one decode step of a layer group attends to, and their pool slots.

    All tensors but `host` are on the device. slots, fetch and live are None if attention reads every row in its block.

    slots: [B, H, M] int32, the pool slot of each selected row. -1 pads, and marks rows that attention reads in their
        blocks.
    fetch: [B, H, M] int32, the rows to fetch, else -1.
    live: [B, H, C] bool, slots that hold a selected row.
    host: slots and fetch on the CPU too, if the index works there and the query is on a GPU.
    fetched: whether the rows to fetch are in their slots.
    """

    selection: Selection
    slots: Tensor | None = None
    fetch: Tensor | None = None
    live: Tensor | None = None
    host: tuple[Tensor, Tensor] | None = None

    @property
    def followed(self) -> Choice:
        """The choice for a layer that follows an anchor: rows and slots. Weights and partials are dropped, as they depend on
        the anchor's keys."""
        return replace(self, selection=Selection(self.selection.rows, self.selection.counts))


class HostSelectionBuffer:
    """Buffers of one layer group for `seqs` sequences, pinned if the group is on a GPU, at fixed addresses.

    query: [B, Hq, D] float32.
    answer: bytes, copied to the device in one copy; parts() splits them.
    """

    def __init__(self, context: IndexContext, seqs: int, rows: int, slots: int) -> None:
        heads, pinned = (seqs, context.kv_heads), context.device.type == "cuda"
        each, live = ((*heads, rows), torch.int32), ((*heads, slots), torch.bool)
        self._parts = (each, (heads, torch.int32), each, each, live)
        self._bytes = [math.prod(size) * dtype.itemsize for size, dtype in self._parts]
        self.query = host_tensor((seqs, context.q_heads, context.head_dim), torch.float32, pinned=pinned)
        self.answer = host_tensor((sum(self._bytes),), torch.uint8, pinned=pinned)

    def parts(self, answer: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Split an answer into a selection and a choice: rows [B, H, M], counts [B, H]; slots, fetch [B, H, M], live [B, H,
        C]."""
        pieces = zip(answer.split(self._bytes), self._parts, strict=True)
        rows, counts, slots, fetch, live = (piece.view(dtype).view(size) for piece, (size, dtype) in pieces)
        return rows, counts, slots, fetch, live


def check_selection(found: object, who: str, context: IndexContext, seqs: int, budget: int, ends: Tensor) -> None:
    """Raise CacheError if an index violated its contract. Copies to the host, and waits for that.

    found: the result of select() for `seqs` sequences and `budget` rows per KV head.
    who: the index's name.
    ends: [B] int32, the end of the positions that the index holds; they begin after the sink.
    """

    def need(ok: bool, what: str) -> None:
        if not ok:
            raise CacheError(f"{who}, layer {context.layer}: {what}")

    if not isinstance(found, Selection):
        raise CacheError(f"{who}, layer {context.layer}: select() returned {type(found).__name__}; it must return a Selection")
    rows, heads = found.rows, (seqs, context.kv_heads)
    width = rows.shape[2] if rows.dim() == 3 else budget
    wanted = {"rows": (rows, (*heads, width), torch.int32), "counts": (found.counts, heads, torch.int32)}
    if found.log_weight is not None:
        wanted["log_weight"] = (found.log_weight, (seqs, context.q_heads, width), torch.float32)
    if found.partial is not None:
        wanted["partial.out"] = (found.partial.out, (seqs, context.q_heads, context.head_dim), torch.float32)
        wanted["partial.lse"] = (found.partial.lse, (seqs, context.q_heads), torch.float32)
    for name, (tensor, size, dtype) in wanted.items():
        is_, must = f"{tensor.dtype} {list(tensor.shape)}", f"{dtype} {list(size)}"
        need(tensor.dtype == dtype and tuple(tensor.shape) == size, f"{name} is {is_}; it must be {must}")
    need(width <= budget, f"rows has {width} places a KV head; at most {budget} may be selected")
    rows, counts, ends = rows.cpu(), found.counts.cpu(), ends.cpu()
    sink = context.regions.sink
    held = rows >= 0
    for bad, what in (
        ((rows < -1) | (held & ((rows < sink) | (rows >= ends[:, None, None]))), "is outside of"),
        (_again(rows), "is there twice; of"),
    ):
        if bad.any():
            seq, head, place = bad.nonzero()[0].tolist()
            where = f"sequence {seq}, KV head {head}"
            need(False, f"{where}: row {int(rows[seq, head, place])} {what} its positions [{sink}, {int(ends[seq])})")
    wrong = held.sum(dim=2) != counts
    if wrong.any():
        seq, head = wrong.nonzero()[0].tolist()
        have = int(held[seq, head].sum())
        need(False, f"sequence {seq}, KV head {head}: counts is {int(counts[seq, head])}, but {have} rows are not -1")


def _again(rows: Tensor) -> Tensor:
    """Mark the repeated rows among rows [B, H, M] of a KV head, [B, H, M] bool."""
    ordered, order = torch.sort(rows, dim=2, stable=True)
    same = torch.zeros_like(rows, dtype=torch.bool)
    same[:, :, 1:] = (ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] >= 0)
    return torch.zeros_like(same).scatter_(2, order, same)
