"""Assign a pool slot to every selected row in one launch: `Residency.admit` for a captured decode step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON


@dataclass(frozen=True, slots=True)
class Placed:
    """Mark selected rows that lie in blocks on the device: attention reads them there, so they need no slot.

    on_host: [B, blocks] bool, which blocks lie on the host.
    block_size: rows per block.
    latest: [B, H, C] int32; `split` writes the M rows selected last to it.
    """

    on_host: Tensor
    block_size: int
    latest: Tensor

    def split(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return rows [B, H, M] with -1 in place of rows on the device, and add these to counts as `admit` does."""
        self.latest[:, :, : rows.shape[2]] = rows
        number = (rows.long() // self.block_size).clamp_(min=0)
        there = ~self.on_host[torch.arange(len(rows), device=rows.device)[:, None, None], number] & (rows >= 0)
        counts[0] += there.sum()
        counts[3] += there.sum()
        counts[2] = torch.maximum(counts[2], (rows >= 0).sum(dim=2).max())
        return torch.where(there, -1, rows)


if TYPE_CHECKING:
    _admit: Any
elif HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _admit(
        rows, row_slot, slot_row, used, counts, slots, fetch, live, order, on_host, latest, count, places, row_stride,
        heads, block_size, host_seq, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
    ):  # fmt: skip
        # Program (sequence, KV head). Threads exchange data through the tables in global memory, with barriers between.
        pair = tl.program_id(0).to(tl.int64)
        row_slot += pair * row_stride
        slot_row += pair * (places + 1)
        used += pair * (places + 1)
        order += pair * places
        m, c = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_C)
        given, is_slot = m < count, c < places
        now = tl.load(used + places) + 1
        row = tl.load(rows + pair * count + m, mask=given, other=-1)
        old = tl.load(slot_row + c, mask=is_slot, other=-1)
        wanted = tl.sum((row >= 0).to(tl.int32), 0)
        if on_host is not None:
            tl.store(latest + pair * places + m, row, mask=given)
            far = tl.load(on_host + pair // heads * host_seq + row // block_size, mask=row >= 0, other=1) != 0
            row = tl.where(far, row, -1)
            near = wanted - tl.sum((row >= 0).to(tl.int32), 0)
            tl.atomic_add(counts + 3, near.to(tl.int64), sem="relaxed")
        slot = tl.load(row_slot + row, mask=row >= 0, other=-1).to(tl.int32)
        hit, miss = slot >= 0, (row >= 0) & (slot < 0)
        tl.store(used + slot, now, mask=hit)
        rank = tl.cumsum(miss.to(tl.int32), 0) - 1
        missing = tl.sum(miss.to(tl.int32), 0)
        tl.atomic_add(counts, wanted.to(tl.int64), sem="relaxed")
        tl.atomic_add(counts + 1, missing.to(tl.int64), sem="relaxed")
        tl.atomic_max(counts + 2, wanted.to(tl.int64), sem="relaxed")
        tl.debug_barrier()
        tl.store(used + places, now)

        # Choose victims by age, the step that last used a slot. Every round but the last removes one age for good, and a step
        # adds one age, so a step takes two rounds on average.
        last = tl.load(used + c, mask=is_slot, other=now)
        free = last != now
        turn = tl.full((BLOCK_C,), -1, tl.int32)
        found = 0
        while found < missing:
            oldest = tl.min(tl.where(free, last, 2147483647), 0)
            same = free & (last == oldest)
            count_same = tl.sum(same.to(tl.int32), 0)
            place = found + tl.cumsum(same.to(tl.int32), 0) - 1
            turn = tl.where(same & (place < missing), place, turn)
            free = free & (last != oldest)
            found = tl.where(count_same > 0, found + count_same, missing)  # always terminates, also with duplicate rows
        victim = turn >= 0
        tl.store(order + turn, c, mask=victim)
        tl.store(row_slot + old, -1, mask=victim & (old >= 0))
        tl.store(used + c, now, mask=victim)
        tl.store(live + pair * places + c, is_slot & ((last == now) | victim), mask=is_slot)
        tl.debug_barrier()

        taken = tl.load(order + rank, mask=miss, other=-1)
        tl.store(row_slot + row, taken, mask=miss)
        tl.store(slot_row + taken, row, mask=miss)
        tl.store(slots + pair * count + m, tl.where(hit, slot, taken), mask=given)
        tl.store(fetch + pair * count + m, tl.where(miss, row, -1), mask=given)


def admit(
    rows: Tensor, row_slot: Tensor, slot_row: Tensor, used: Tensor, counts: Tensor, placed: Placed | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Assign a slot to every row; evict the slots used least recently. Ties go to the lower slot. Launches without a sync.

    rows [B, H, M] int32, -1 padded, without duplicates, M <= C. The tables are updated in place: row_slot [B, H, T + 1] int32
    or int16, the slot of a row or -1; slot_row [B, H, C + 1] int32, the row in a slot or -1; used [B, H, C + 1] int32, the step
    that last used a slot. The last column of row_slot and slot_row is unused; the last column of `used` holds the number of the
    last step and is incremented. counts [4] int64: the numbers of selected rows and of misses are added to the first two; the
    third is the largest number of rows that a head selected in one step; the rows that get no slot since they lie in blocks on
    the device, see Placed, are added to the last.

    Returns slots [B, H, M] int32, -1 where rows is -1; fetch [B, H, M] int32, the rows that must be fetched, else -1; live [B,
    H, C] bool, the slots that hold a row of this step. The i-th miss takes the i-th slot in the order (used, slot).

    8 heads of 1024 rows read and write about 200 KB, which is negligible. The latency is four dependent memory accesses and
    about two rounds of reductions over the slots. The accesses are rows, their slots, the steps in `used`, and the order of
    the victims.
    """
    batch, heads, count = rows.shape
    places = slot_row.shape[2] - 1
    tables = (row_slot, slot_row, used)
    assert count <= places, f"{count} rows do not fit into {places} slots"
    for tensor in (rows, *tables):
        assert tensor.is_contiguous()
        assert tensor.dtype == torch.int32 or (tensor is row_slot and tensor.dtype == torch.int16)
        assert tensor.shape[:2] == (batch, heads)
    assert used.shape == slot_row.shape
    assert counts.dtype == torch.int64
    assert counts.shape == (4,)
    assert counts.is_contiguous()
    on_host = latest = None
    if placed is not None:
        on_host, latest = placed.on_host, placed.latest
        assert on_host.dtype == torch.bool
        assert on_host.stride(1) == 1
        assert len(on_host) == batch
        assert latest.dtype == torch.int32
        assert latest.shape == (batch, heads, places)
        assert latest.is_contiguous()
    slots, fetch = torch.empty_like(rows), torch.empty_like(rows)
    live = torch.empty((batch, heads, places), dtype=torch.bool, device=rows.device)
    order = torch.empty((batch, heads, places), dtype=torch.int32, device=rows.device)
    block_m, block_c = (max(32, 1 << (size - 1).bit_length()) for size in (count, places))
    _admit[(batch * heads,)](
        rows, *tables, counts, slots, fetch, live, order, on_host, latest, count, places, row_slot.shape[2],
        heads, 1 if placed is None else placed.block_size, 0 if on_host is None else on_host.stride(0),
        BLOCK_M=block_m, BLOCK_C=block_c, num_warps=min(16, max(1, max(block_m, block_c) // 128)),
    )  # fmt: skip
    return slots, fetch, live
