"""Which rows are on the device, in which slot of the pool, and which of them must go."""

from __future__ import annotations

import torch
from torch import Tensor


class Residency:
    """A direct-mapped table from rows to slots for each lane and KV head.

    row_slot [B, H, T + 1] int32: the slot of a row or -1. slot_row [B, H, C + 1] int32: the row in a slot or -1. used [B, H, C + 1]
    int32: the step at which a slot was last wanted. The last column of each is a place where writes that mean nothing go, so that
    admit() has no branches, static shapes and no host sync. Rows replaced are those wanted longest ago.
    """

    def __init__(self, lanes: int, kv_heads: int, slots: int, *, device: torch.device) -> None:
        self.slots, self.device = slots, device
        self.row_slot = torch.full((lanes, kv_heads, 1), -1, dtype=torch.int32, device=device)
        self.slot_row = torch.full((lanes, kv_heads, slots + 1), -1, dtype=torch.int32, device=device)
        self.used = torch.zeros((lanes, kv_heads, slots + 1), dtype=torch.int32, device=device)
        self.step = torch.zeros((), dtype=torch.int32, device=device)

    def grow(self, length: int) -> None:
        """Make room for rows 0 .. length - 1; tables grow by doubling."""
        have = self.row_slot.shape[2] - 1
        if length > have:
            shape = (*self.row_slot.shape[:2], max(length, 2 * have, 256) + 1)
            grown = torch.full(shape, -1, dtype=torch.int32, device=self.device)
            grown[:, :, :have] = self.row_slot[:, :, :have]
            self.row_slot = grown

    def admit(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Give every row a slot. rows: [B, H, M] int32, -1 padded, none twice, M <= C.

        Returns (slots [B, H, M] int32, -1 where rows is -1; fetch [B, H, M] int32: the row where it must be brought, else -1).
        """
        self.step += 1  # in place: a captured step counts on
        trash_row, trash_slot = self.row_slot.shape[2] - 1, self.slots
        wanted = rows >= 0
        row = torch.where(wanted, rows, trash_row).long()
        slot = self.row_slot.gather(2, row)
        hit = wanted & (slot >= 0)
        miss = wanted & (slot < 0)
        self.used.scatter_(2, torch.where(hit, slot, trash_slot).long(), self.step.expand(rows.shape))
        # The i-th miss takes the i-th slot in the order of last use; slots that were hit come last, and C >= M leaves enough.
        order = torch.sort(self.used[:, :, : self.slots], dim=2, stable=True).indices
        rank = (torch.cumsum(miss, dim=2) - 1).clamp_(0, self.slots - 1)
        victim = torch.where(miss, order.gather(2, rank), trash_slot)
        old = self.slot_row.gather(2, victim).long()
        self.row_slot.scatter_(2, torch.where(miss & (old >= 0), old, trash_row), -1)
        taken = torch.where(miss, row, trash_row)
        self.row_slot.scatter_(2, taken, victim.int())
        self.row_slot[:, :, trash_row] = -1
        self.slot_row.scatter_(2, victim, torch.where(miss, rows, -1))
        self.used.scatter_(2, victim, self.step.expand(rows.shape))
        self.slot_row[:, :, trash_slot] = -1
        fetch = torch.where(miss, rows, -1)
        return torch.where(hit, slot, torch.where(miss, victim.int(), -1)), fetch

    def clear(self, lane: int, length: int = 0) -> None:
        """Forget the rows >= length of a lane."""
        gone = self.slot_row[lane] >= length
        self.slot_row[lane].masked_fill_(gone, -1)
        self.used[lane].masked_fill_(gone, 0)
        self.row_slot[lane, :, length:] = -1

    def reorder(self, lanes: Tensor) -> None:
        """Lane i becomes what lane lanes[i] was; lanes [B'] int64."""
        self.row_slot, self.slot_row, self.used = (t.index_select(0, lanes) for t in (self.row_slot, self.slot_row, self.used))

    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.row_slot, self.slot_row, self.used))
