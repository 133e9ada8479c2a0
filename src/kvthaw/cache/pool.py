"""The device slab of one layer: sink, ring and pool in one tensor; which rows are in the pool's slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvthaw.kernels.admit import Placed
from kvthaw.kernels.admit import admit as device_admit
from kvthaw.native import admission
from kvthaw.native import admit as native_admit
from kvthaw.regions import Regions


class Slab:
    """One tensor for sink, ring and pool, so that a decode step is one masked attention over it.

    It starts as zeros and holds only written rows, so slots that the mask hides are finite.

    data: [B, H, N, 2, D] with N = sink + ring + slots: the sink by position, then the ring, then the pool's slots.
    tickets: [B, 1 + H] int32; see `kvthaw.kernels.flash_decode`.
    """

    def __init__(
        self, seqs: int, kv_heads: int, head_dim: int, regions: Regions, slots: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.regions, self.slots = regions, slots
        self.pool_start = regions.sink + regions.ring
        self.data = torch.zeros((seqs, kv_heads, self.pool_start + slots, 2, head_dim), dtype=dtype, device=device)
        self.tickets = torch.zeros((seqs, 1 + kv_heads), dtype=torch.int32, device=device)

    @property
    def keys(self) -> Tensor:
        """Keys [B, H, N, D], a view."""
        return self.data[:, :, :, 0]

    @property
    def values(self) -> Tensor:
        """Values [B, H, N, D], a view."""
        return self.data[:, :, :, 1]

    def tensors(self) -> list[Tensor]:
        """Return the tensors."""
        return [self.data, self.tickets]

    def held(self) -> Tensor:
        """Return sink and ring, [B, H, sink + ring, 2, D], a view."""
        return self.data[:, :, : self.pool_start]

    def runs(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the slots of positions start .. stop in sink and ring, as at most three (first, end) runs of adjacent slots."""
        sink, ring, found = self.regions.sink, self.regions.ring, []
        while start < stop:
            place = start if start < sink else sink + (start - sink) % ring
            end = sink if start < sink else sink + ring
            n = min(stop - start, end - place)
            found.append((place, place + n))
            start += n
        return found

    def write(self, seq: int, start: int, rows: Tensor) -> None:
        """Write rows [H, n, 2, D] of positions start .. start + n to their slots. They must fit in sink and ring."""
        done = 0
        for place, end in self.runs(start, start + rows.shape[1]):
            self.data[seq, :, place:end].copy_(rows[:, done : done + end - place])
            done += end - place

    def read(self, seq: int, start: int, stop: int) -> Tensor:
        """Return a copy of rows start .. stop, [H, stop - start, 2, D], which are in sink or ring."""
        pieces = [self.data[seq, :, place:end] for place, end in self.runs(start, stop)]
        return torch.cat(pieces or [self.data[seq, :, :0]], dim=1)

    def widen(self, slots: int) -> None:
        """Add slots, in a new tensor."""
        self.data = F.pad(self.data, (0, 0, 0, 0, 0, slots - self.slots))
        self.slots = slots

    def reorder(self, seqs: Tensor) -> None:
        """Replace sequence i by the former sequence seqs[i]; seqs [B'] int64."""
        self.data = self.data.index_select(0, seqs)
        self.tickets = self.tickets.index_select(0, seqs)


def slot_dtype(slots: int, device: torch.device) -> torch.dtype:
    """Return the dtype of slots in a table that has one for each row: int16 where they fit, int32 on a CPU."""
    return torch.int16 if device.type != "cpu" and slots <= torch.iinfo(torch.int16).max else torch.int32


class Counted(NamedTuple):
    """Rows of a Residency over all steps.

    selected: rows selected.
    fetched: rows fetched to the pool, counted once for the group. Each layer of the group fetches them.
    most: the most rows that a KV head selected in a step.
    in_place: rows that attention read in blocks on the device.
    """

    selected: int
    fetched: int
    most: int
    in_place: int


class Residency:
    """A direct-mapped table from rows to slots for each sequence and KV head. It evicts the least recently used slots.

    The last column of row_slot and slot_row receives discarded writes, so that admit() has no branches, static shapes and
    no host sync.

    row_slot: [B, H, T + 1], the slot of a row, or -1; see slot_dtype.
    slot_row: [B, H, C + 1] int32, the row in a slot, or -1.
    used: [B, H, C + 1] int32, the step at which a slot was last used. The last column is the number of the last step.
    counts: [4] int64, as Counted.
    latest: [B, H, C] int32, the rows wanted last, if some blocks lie on the device.
    """

    def __init__(self, seqs: int, kv_heads: int, slots: int, *, device: torch.device) -> None:
        self.slots, self.device = slots, device
        self.row_slot = torch.full((seqs, kv_heads, 1), -1, dtype=slot_dtype(slots, device), device=device)
        self.slot_row = torch.full((seqs, kv_heads, slots + 1), -1, dtype=torch.int32, device=device)
        self.used = torch.zeros((seqs, kv_heads, slots + 1), dtype=torch.int32, device=device)
        self.latest = torch.full((seqs, kv_heads, slots), -1, dtype=torch.int32, device=device)
        self.counts = torch.zeros(4, dtype=torch.int64, device=device)

    def counted(self) -> Counted:
        """Return `counts` as numbers. Waits for the device."""
        return Counted(*self.counts.tolist())

    def grow(self, length: int) -> None:
        """Make room for rows 0 .. length - 1. Tables grow by doubling."""
        have = self.row_slot.shape[2] - 1
        if length > have:
            shape = (*self.row_slot.shape[:2], max(length, 2 * have, 256) + 1)
            grown = torch.full(shape, -1, dtype=self.row_slot.dtype, device=self.device)
            grown[:, :, :have] = self.row_slot[:, :, :have]
            self.row_slot = grown

    def widen(self, slots: int) -> None:
        """Add slots, in new tensors. Rows stay in their slots. If memory is short, nothing changes."""
        more = slots - self.slots
        slot_row = F.pad(self.slot_row[:, :, :-1], (0, more + 1), value=-1)
        used = torch.cat((F.pad(self.used[:, :, :-1], (0, more)), self.used[:, :, -1:]), dim=2)
        latest, row_slot = F.pad(self.latest, (0, more), value=-1), self.row_slot.to(slot_dtype(slots, self.device))
        self.slots, self.slot_row, self.used, self.latest, self.row_slot = slots, slot_row, used, latest, row_slot

    def admit(
        self, rows: Tensor, out: tuple[Tensor, Tensor, Tensor] | None = None, *, blocks: tuple[Tensor, int] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Assign a slot to every row.

        rows: [B, H, M] int32 of the first B sequences, -1 padded, no row twice, M <= C.
        out: host tensors that receive the result.
        blocks: which blocks lie on the host, [., blocks] bool, and the block size. Rows of other blocks are read there and
            get no slot.

        Returns slots [B, H, M] int32, -1 where rows is -1; fetch [B, H, M] int32, the row if it must be fetched, else -1;
        and live [B, H, C] bool, the slots that hold a row of this step.
        """
        rows, placed, tables = rows.contiguous(), None, self._tables(len(rows))
        if blocks is not None:
            placed = Placed(blocks[0][: len(rows)], blocks[1], self.latest[: len(rows)])
        if self.device.type == "cuda":
            return device_admit(rows, *tables, placed)
        if placed is not None:
            rows = placed.split(rows, self.counts)
        return native_admit(rows, *tables, out)

    def admission(self, rows: Tensor, out: tuple[Tensor, Tensor, Tensor]) -> Callable[[], None]:
        """Return a function that runs admit() on the host for the current content of `rows` and writes the result to `out`."""
        asked, prepared = (self.row_slot, self.used), admission(rows, *self._tables(len(rows)), out)

        def admit() -> None:
            nonlocal asked, prepared
            if self.row_slot is not asked[0] or self.used is not asked[1]:  # which reorder() or growth replaced
                asked, prepared = (self.row_slot, self.used), admission(rows, *self._tables(len(rows)), out)
            prepared()

        return admit

    def _tables(self, seqs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.row_slot[:seqs], self.slot_row[:seqs], self.used[:seqs], self.counts

    def clear(self, seq: int | slice, length: int = 0) -> None:
        """Drop the rows >= length of a sequence or of several."""
        if length == 0:
            for table in (self.slot_row, self.row_slot, self.latest):
                table[seq].fill_(-1)
            self.used[seq].zero_()
            return
        gone = self.slot_row[seq] >= length
        self.slot_row[seq].masked_fill_(gone, -1)
        self.used[seq].masked_fill_(gone, 0)
        self.row_slot[seq][..., length:] = -1
        self.latest[seq].masked_fill_(self.latest[seq] >= length, -1)

    def reorder(self, seqs: Tensor) -> None:
        """Replace sequence i by the former sequence seqs[i]; seqs [B'] int64."""
        tables = self.row_slot, self.slot_row, self.used, self.latest
        self.row_slot, self.slot_row, self.used, self.latest = (table.index_select(0, seqs) for table in tables)

    def tensors(self) -> list[Tensor]:
        """Return the tables."""
        return [self.row_slot, self.slot_row, self.used, self.latest]
