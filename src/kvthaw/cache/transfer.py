"""Transfers that fetch rows from the host to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import Literal, Protocol

import torch
from torch import Tensor

from kvthaw.cache.host import HostStore
from kvthaw.cache.host_memory import host_tensor
from kvthaw.cache.pool import Slab
from kvthaw.errors import ConfigError, one_of
from kvthaw.kernels.row_format import RowFormat
from kvthaw.kernels.uva_gather import crossing, uva_gather


class Rows(Protocol):
    """Rows on the host, by sequence, head, and position or place."""

    format: RowFormat

    @property
    def pinned(self) -> bool:
        """Whether the rows are pinned."""

    def gather(self, rows: Tensor, out: Tensor) -> tuple[int, Tensor]:
        """Gather rows, as `kvthaw.native.gather_rows` does."""

    def piece(self, seq: int, head: int, row: int, most: int) -> Tensor:
        """Return at most `most` contiguous rows of a head, from `row` on, [n, *tail]."""


def scatter(slab: Slab, rows: Tensor, which: Tensor, slots: Tensor) -> None:
    """Write rows [n, 2, D], on the slab's device, to pool slots.

    which: [n] on the CPU, flat indices into slots [B, H, M].
    """
    seqs, heads, n = slab.data.shape[:3]
    place = which // slots.shape[2] * n + slab.pool_start + slots.reshape(-1)[which]
    if slab.data.device.type == "cuda":
        place = place.pin_memory().to(slab.data.device, non_blocking=True)
    slab.data.view(seqs * heads * n, 2, -1).index_copy_(0, place, rows)


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
        host.wait()
        fetch = fetch.cpu()
        if host.allocator.device is not None:
            host.crossed[0] += crossing(host.table.which_on_host(), host.block_size, fetch).sum().to(host.crossed.device)
        self.copy(host, slab, fetch, slots.cpu())

    def copy(self, source: Rows, slab: Slab, fetch: Tensor, slots: Tensor) -> None:
        """Copy rows as fetch() does, from rows in any order.

        fetch, slots: on the CPU.
        """
        if self._sent is not None:  # the last copy may still read the staging buffer
            self._sent.synchronize()
        if self._staging.shape[0] < fetch.numel() or self._staging.dtype != source.format.stored:
            shape = fetch.numel(), *source.format.tail
            self._staging = host_tensor(shape, source.format.stored, pinned=source.pinned)
        count, which = source.gather(fetch.contiguous(), self._staging)
        if count == 0:
            return
        rows = self._staging[:count]
        if slab.data.device.type == "cuda":
            rows = rows.to(slab.data.device, non_blocking=True)
            self._sent = torch.cuda.current_stream().record_event()
        scatter(slab, source.format.decode(rows), which, slots)

    def __deepcopy__(self, memo: dict[int, object]) -> BulkCopy:
        return BulkCopy()


class PieceCopy:
    """One copy for each run of rows that are adjacent on the host, then a scatter (PRKV, figure 22, left)."""

    graph_safe = False

    def fetch(self, host: HostStore, slab: Slab, fetch: Tensor, slots: Tensor) -> None:
        """Fetch as BulkCopy.fetch does."""
        host.wait()
        self.copy(host, slab, fetch.cpu(), slots.cpu())

    def copy(self, source: Rows, slab: Slab, fetch: Tensor, slots: Tensor) -> None:
        """Copy as BulkCopy.copy does."""
        which = (fetch.reshape(-1) >= 0).nonzero()[:, 0]
        shape = len(which), *source.format.tail
        rows = torch.empty(shape, dtype=source.format.stored, device=slab.data.device)
        done = 0
        for seq, head, row, count in _runs(fetch):
            stop = row + count
            while row < stop:
                piece = source.piece(seq, head, row, stop - row)
                rows[done : done + len(piece)].copy_(piece, non_blocking=True)
                done, row = done + len(piece), row + len(piece)
        if done:
            scatter(slab, source.format.decode(rows), which, slots)


def _runs(fetch: Tensor) -> Iterator[tuple[int, int, int, int]]:
    """Yield (sequence, head, first row, count) for runs of consecutive rows among rows [B, H, M]; -1 is skipped."""
    for seq, heads in enumerate(fetch.tolist()):
        for head, rows in enumerate(heads):
            known = enumerate(row for row in rows if row >= 0)
            for _, run in groupby(known, key=lambda each: each[1] - each[0]):
                (_, first), *rest = run
                yield seq, head, first, 1 + len(rest)


class PagedCopy:
    """Fetch rows from the store's page-ordered copy if they are in it, else from their blocks; see PageCopy.

    make: BulkCopy or PieceCopy.
    """

    graph_safe = False

    def __init__(self, make: Callable[[], BulkCopy | PieceCopy]) -> None:
        self._make, self._paged, self._others = make, make(), make()

    def fetch(self, host: HostStore, slab: Slab, fetch: Tensor, slots: Tensor) -> None:
        """Fetch as BulkCopy.fetch does."""
        host.wait()
        assert host.pages is not None
        fetch, slots, pages = fetch.cpu(), slots.cpu(), host.pages.now()
        places = pages.places(fetch)
        self._paged.copy(pages, slab, places, slots)
        self._others.copy(host, slab, torch.where(places < 0, fetch, -1), slots)

    def __deepcopy__(self, memo: dict[int, object]) -> PagedCopy:
        return PagedCopy(self._make)


class UvaGather:
    """A kernel on the device reads the rows from pinned host memory (ParisKV, section 4.3). No host sync."""

    graph_safe = True

    def fetch(self, host: HostStore, slab: Slab, fetch: Tensor, slots: Tensor) -> None:
        """Fetch as BulkCopy.fetch does, with fetch and slots on the device."""
        host.order(slab.data.device)
        table = host.table.on(slab.data.device)
        count = None if host.allocator.device is None else (host.table.on_host, host.crossed)
        uva_gather(table, host.block_size, slab.data, fetch, slots, slab.pool_start, count, host.format)


Way = Literal["uva", "bulk", "each"]
Layout = Literal["token", "page"]
COPIES: dict[str, Callable[[], BulkCopy | PieceCopy] | None] = {"uva": None, "bulk": BulkCopy, "each": PieceCopy}


def transfer_of(transfer: Way, layout: Layout = "token") -> Callable[[], BulkCopy | PieceCopy | PagedCopy] | None:
    """Return the class that makes the Transfer of a name in COPIES; None for a method's default.

    Raises ConfigError for unknown names, and for pages with a transfer that cannot copy them.

    layout: "page" copies rows in page order if the index keeps such a copy.
    """
    one_of(COPIES, transfer=transfer)
    one_of(("token", "page"), layout=layout)
    copies = COPIES[transfer]
    if layout == "token":
        return copies
    if copies is None:
        raise ConfigError("layout is 'page' and transfer is 'uva'; pages are copied by 'bulk' or 'each'")
    return partial(PagedCopy, copies)
