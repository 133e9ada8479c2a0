"""Transfers that fetch rows from the host to the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from kvthaw.cache.choice import Choice
from kvthaw.cache.host import HostStore
from kvthaw.cache.host_memory import host_tensor
from kvthaw.cache.index_api import Index, Transfer
from kvthaw.cache.pool import Slab
from kvthaw.errors import one_of
from kvthaw.kernels.row_format import RowFormat
from kvthaw.kernels.uva_gather import crossing, uva_gather

Gather = Callable[[Tensor, Tensor], tuple[int, Tensor]]
"""Gathers rows into a buffer, as `kvthaw.native.gather_rows` does."""


def scatter(slab: Slab, rows: Tensor, which: Tensor, slots: Tensor) -> None:
    """Write rows [n, 2, D], on the slab's device, to pool slots.

    which: [n] on the CPU, flat indices into slots [B, H, M].
    """
    seqs, heads, n = slab.data.shape[:3]
    place = which // slots.shape[2] * n + slab.pool_start + slots.reshape(-1)[which]
    if slab.data.device.type == "cuda":
        place = place.pin_memory().to(slab.data.device, non_blocking=True)
    slab.data.view(seqs * heads * n, 2, -1).index_copy_(0, place, rows)


def fetch_choice(transfer: Transfer, choice: Choice, store: HostStore, slab: Slab, index: Index | None) -> None:
    """Fetch the rows of a choice that are not in their slots.

    index: replaces fetched keys, if it rebuilds them; None: it is another layer's.
    """
    if choice.slots is None or choice.fetch is None:
        return
    slots, fetch = choice.host if choice.host and not transfer.graph_safe else (choice.slots, choice.fetch)
    transfer.fetch(store, slab, fetch, slots)
    if index is not None and index.traits.rebuilds:
        index.rebuild(slab, choice.fetch, choice.slots)


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
        if host.allocator.device is not None:
            host.crossed[0] += crossing(host.table.which_on_host(), host.block_size, fetch).sum().to(host.crossed.device)
        self.copy(host.gather, host.format, slab, fetch, slots.cpu(), pinned=host.allocator.pinned)

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
        count = None if host.allocator.device is None else (host.table.on_host, host.crossed)
        uva_gather(table, host.block_size, slab.data, fetch, slots, slab.pool_start, count, host.format)


Way = Literal["uva", "bulk"]
COPIES: dict[str, type[BulkCopy] | None] = {"uva": None, "bulk": BulkCopy}


def transfer_of(transfer: Way) -> type[BulkCopy] | None:
    """Return the class that makes the Transfer of a name in COPIES; None for a method's default. Raises ConfigError for others."""
    one_of(COPIES, transfer=transfer)
    return COPIES[transfer]
