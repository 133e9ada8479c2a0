"""What a decode step of a layer group attends to: choices, their checks, and the transfers that fetch rows from the host."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kvthaw.cache.host import HostStore
from kvthaw.cache.host_memory import host_tensor
from kvthaw.cache.index_api import IndexContext, Selection
from kvthaw.cache.pool import Slab
from kvthaw.errors import CacheError, one_of
from kvthaw.kernels.gpu import sent
from kvthaw.kernels.row_format import RowFormat
from kvthaw.kernels.uva_gather import crossing, uva_gather


@dataclass(frozen=True, slots=True)
class Choice:
    """The rows that one decode step of a layer group attends to, and their pool slots.

    All tensors but `host` are on the device. slots, fetch and live are None if attention reads every row in its block.

    slots: [B, H, M] int32, the pool slot of each selected row. -1 pads, and marks rows that attention reads in their
        blocks.
    fetch: [B, H, M] int32, the rows to fetch, else -1.
    live: [B, H, C] bool, slots that hold a selected row.
    host: slots and fetch on the CPU too, if the index works there and the query is on a GPU.
    """

    selection: Selection
    slots: Tensor | None = None
    fetch: Tensor | None = None
    live: Tensor | None = None
    host: tuple[Tensor, Tensor] | None = None

    @property
    def followed(self) -> Choice:
        """The choice for a follower: rows and slots. Weights and partials depend on the anchor's keys."""
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
        """Split an answer: rows [B, H, M] and counts [B, H] of a selection; slots, fetch [B, H, M], live [B, H, C] of a choice."""
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


Gather = Callable[[Tensor, Tensor], tuple[int, Tensor]]
"""Gathers rows into a buffer, as `kvthaw.native.gather_rows` does."""


def scatter(slab: Slab, rows: Tensor, which: Tensor, slots: Tensor) -> None:
    """Write rows [n, 2, D], on the slab's device, to pool slots.

    which: [n] on the CPU, flat indices into slots [B, H, M].
    """
    seqs, heads, n = slab.data.shape[:3]
    place = which // slots.shape[2] * n + slab.pool_start + slots.reshape(-1)[which]
    slab.data.view(seqs * heads * n, 2, -1).index_copy_(0, sent(place, slab.data.device), rows)


class BulkCopy:
    """Gather on CPU threads into one pinned buffer, one copy, scatter (IceCache, section 4.3, figure 4; PRKV, section 4.2)."""

    graph_safe = False

    def __init__(self) -> None:
        self._staging = torch.empty(0)
        self._sent: torch.cuda.Event | None = None

    def fetch(self, host: HostStore, slab: Slab, fetch: Tensor, slots: Tensor) -> None:
        """Write row fetch[b, h, m] of sequence b, head h into pool slot slots[b, h, m]. For tensors on a GPU the host waits.

        fetch, slots: [B, H, M] int32; -1 in fetch skips.
        """
        fetch = fetch.cpu()
        if host.device is not None:
            host.crossed[0] += crossing(host.table.which_on_host(), host.block_size, fetch).sum().to(host.crossed.device)
        self.copy(host.gather, host.format, slab, fetch, slots.cpu(), pinned=host.pinned)

    def copy(self, gather: Gather, format: RowFormat, slab: Slab, fetch: Tensor, slots: Tensor, *, pinned: bool) -> None:
        """Copy rows as fetch() does, from where `gather` finds them.

        fetch, slots: on the CPU.
        pinned: whether rows pass through pinned memory.
        """
        if self._sent is not None:  # the last copy may still read the staging buffer
            self._sent.synchronize()
        if self._staging.shape[0] < fetch.numel() or self._staging.dtype != format.stored:
            shape = fetch.numel(), *format.tail
            self._staging = host_tensor(shape, format.stored, pinned=pinned)
        count, which = gather(fetch.contiguous(), self._staging)
        if count == 0:
            return
        rows = self._staging[:count]
        if slab.data.device.type == "cuda":
            rows = rows.to(slab.data.device, non_blocking=True)
            self._sent = torch.cuda.current_stream().record_event()
        scatter(slab, format.decode(rows), which, slots)


class UvaGather:
    """A kernel on the device reads the rows from pinned host memory (ParisKV, section 4.3). No host sync."""

    graph_safe = True

    def fetch(self, host: HostStore, slab: Slab, fetch: Tensor, slots: Tensor) -> None:
        """Fetch as BulkCopy.fetch does, with fetch and slots on the device."""
        host.order(slab.data.device)
        table = host.table.on(slab.data.device)
        count = None if host.device is None else (host.table.on_host, host.crossed)
        uva_gather(table, host.block_size, slab.data, fetch, slots, slab.pool_start, count, host.format)


Way = Literal["uva", "bulk"]
COPIES: dict[str, type[BulkCopy] | None] = {"uva": None, "bulk": BulkCopy}


def transfer_of(transfer: Way) -> type[BulkCopy] | None:
    """Return the class that makes the Transfer of a name in COPIES; None for a method's default. Raises ConfigError for others."""
    one_of(COPIES, transfer=transfer)
    return COPIES[transfer]
