"""Two ways to bring rows from the host to the device."""

from __future__ import annotations

import torch
from torch import Tensor

from kvthaw.cache.host import HostStore
from kvthaw.cache.host_memory import host_tensor
from kvthaw.cache.pool import Slab
from kvthaw.kernels.uva_gather import crossing, uva_gather
from kvthaw.native import gather_rows


class BulkCopy:
    """Gather on CPU threads into one pinned buffer, one copy, scatter (IceCache, section 4.3, figure 4)."""

    graph_safe = False

    def __init__(self) -> None:
        self._staging: Tensor | None = None
        self._sent: torch.cuda.Event | None = None

    def fetch(self, host: HostStore, slab: Slab, fetch: Tensor, slots: Tensor) -> None:
        """Write row fetch[b, h, m] of sequence b, head h into pool slot slots[b, h, m]. Both [B, H, M] int32 on the CPU; -1
        skips."""
        if self._sent is not None:  # the last copy may still read the staging buffer
            self._sent.synchronize()
        wanted = fetch.numel()
        staging = self._buffer(host, wanted)
        if host.allocator.device is not None:
            host.crossed[0] += crossing(host.on_host(), host.block_size, fetch).sum().to(host.crossed.device)
        count, which = gather_rows(host.table(), host.block_size, fetch.contiguous(), staging)
        if count == 0:
            return
        seqs, heads, n = slab.data.shape[:3]
        place = which // fetch.shape[2] * n + slab.pool_start + slots.reshape(-1)[which]
        rows = staging[:count]
        if slab.data.device.type == "cuda":
            rows = rows.to(slab.data.device, non_blocking=True)
            place = place.pin_memory().to(slab.data.device, non_blocking=True)
            self._sent = torch.cuda.Event()
            self._sent.record()
        slab.data.view(seqs * heads * n, 2, -1).index_copy_(0, place, rows)

    def _buffer(self, host: HostStore, rows: int) -> Tensor:
        if self._staging is None or self._staging.shape[0] < rows or self._staging.dtype != host.dtype:
            shape = (rows, 2, host.head_dim)
            self._staging = host_tensor(shape, host.dtype, pinned=host.pinned)
        return self._staging

    def __deepcopy__(self, memo: dict[int, object]) -> BulkCopy:
        return BulkCopy()


class UvaGather:
    """A kernel on the device reads the rows from pinned host memory (ParisKV, section 4.3). No host sync."""

    graph_safe = True

    def fetch(self, host: HostStore, slab: Slab, fetch: Tensor, slots: Tensor) -> None:
        """As BulkCopy.fetch, with fetch and slots on the device."""
        table = host.table_on(slab.data.device)
        count = None if host.allocator.device is None else (host.on_device.on_host, host.crossed)
        uva_gather(table, host.block_size, slab.data, fetch, slots, slab.pool_start, count)
