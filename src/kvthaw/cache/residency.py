"""Pool residency: which rows are in which pool slot, and which slots to evict."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kvthaw.kernels.admit import Placed
from kvthaw.kernels.admit import admit as device_admit
from kvthaw.native import admission
from kvthaw.native import admit as native_admit


class Residency:
    """A direct-mapped table from rows to slots for each sequence and KV head. It evicts the least recently used slots.

    The last column of row_slot and slot_row receives discarded writes, so that admit() has no branches, static shapes and
    no host sync.

    row_slot: [B, H, T + 1] int32, the slot of a row, or -1.
    slot_row: [B, H, C + 1] int32, the row in a slot, or -1.
    used: [B, H, C + 1] int32, the step at which a slot was last used. The last column is the number of the last step.
    counts: [4] int64 over all steps: rows wanted, rows fetched, most rows that a head wanted, rows read in blocks on the
        device.
    latest: [B, H, C] int32, the rows wanted last, if some blocks lie on the device.
    """

    def __init__(self, seqs: int, kv_heads: int, slots: int, *, device: torch.device) -> None:
        self.slots, self.device = slots, device
        self.row_slot = torch.full((seqs, kv_heads, 1), -1, dtype=torch.int32, device=device)
        self.slot_row = torch.full((seqs, kv_heads, slots + 1), -1, dtype=torch.int32, device=device)
        self.used = torch.zeros((seqs, kv_heads, slots + 1), dtype=torch.int32, device=device)
        self.latest = torch.full((seqs, kv_heads, slots), -1, dtype=torch.int32, device=device)
        self.counts = torch.zeros(4, dtype=torch.int64, device=device)

    @property
    def capacity(self) -> int:
        """Number of rows that the tables have room for."""
        return self.row_slot.shape[2] - 1

    def grow(self, length: int) -> None:
        """Make room for rows 0 .. length - 1. Tables grow by doubling."""
        have = self.capacity
        if length > have:
            shape = (*self.row_slot.shape[:2], max(length, 2 * have, 256) + 1)
            grown = torch.full(shape, -1, dtype=torch.int32, device=self.device)
            grown[:, :, :have] = self.row_slot[:, :, :have]
            self.row_slot = grown

    def widen(self, slots: int) -> None:
        """Add slots, in new tensors. Rows stay in their slots."""
        more = slots - self.slots
        self.slot_row = F.pad(self.slot_row[:, :, :-1], (0, more + 1), value=-1)
        self.used = torch.cat((F.pad(self.used[:, :, :-1], (0, more)), self.used[:, :, -1:]), dim=2)
        self.latest = F.pad(self.latest, (0, more), value=-1)
        self.slots = slots

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

    def clear(self, seq: int, length: int = 0) -> None:
        """Drop the rows >= length of a sequence."""
        if length == 0:
            for table in (self.slot_row, self.row_slot, self.latest):
                table[seq].fill_(-1)
            self.used[seq].zero_()
            return
        gone = self.slot_row[seq] >= length
        self.slot_row[seq].masked_fill_(gone, -1)
        self.used[seq].masked_fill_(gone, 0)
        self.row_slot[seq, :, length:] = -1
        self.latest[seq].masked_fill_(self.latest[seq] >= length, -1)

    def reorder(self, seqs: Tensor) -> None:
        """Replace sequence i by the former sequence seqs[i]; seqs [B'] int64."""
        tables = self.row_slot, self.slot_row, self.used, self.latest
        self.row_slot, self.slot_row, self.used, self.latest = (table.index_select(0, seqs) for table in tables)

    def tensors(self) -> list[Tensor]:
        """Return the tables."""
        return [self.row_slot, self.slot_row, self.used, self.latest]
