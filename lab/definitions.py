"""Plain torch definitions of kernels that the package itself never runs; tests and measurements compare the kernels with them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvthaw.kernels.admit import Placed
from kvthaw.kernels.in_place import Selected, pooled
from kvthaw.kernels.row_format import RowFormat
from kvthaw.kernels.topk import Floor, heaviest, positions


def admit(
    rows: Tensor, row_slot: Tensor, slot_row: Tensor, used: Tensor, counts: Tensor, placed: Placed | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Assign a slot to every row, as the kernel of that name does; its last column of `used` has the last step's number.

    The last column of row_slot and slot_row takes discarded writes. The i-th miss takes the i-th slot in the order (used, slot).
    """
    if placed is not None:
        rows = placed.split(rows, counts)
    trash_row, count = row_slot.shape[2] - 1, slot_row.shape[2] - 1
    wanted = rows >= 0
    row = torch.where(wanted, rows, trash_row).long()
    slot = row_slot.gather(2, row).int()
    hit, miss = wanted & (slot >= 0), wanted & (slot < 0)
    step = used[:, :, count:] + 1
    now = step.expand(slot.shape)
    used.scatter_(2, torch.where(hit, slot, count).long(), now)
    order = torch.sort(used[:, :, :count], dim=2, stable=True).indices
    rank = (torch.cumsum(miss, dim=2) - 1).clamp_(0, count - 1)
    victim = torch.where(miss, order.gather(2, rank), count)
    old = slot_row.gather(2, victim).long()
    row_slot.scatter_(2, torch.where(miss & (old >= 0), old, trash_row), -1)
    row_slot.scatter_(2, torch.where(miss, row, trash_row), victim.to(row_slot.dtype))
    row_slot[:, :, trash_row] = -1
    slot_row.scatter_(2, victim, torch.where(miss, rows, -1))
    slot_row[:, :, count] = -1
    used.scatter_(2, victim, now)
    used[:, :, count:] = step
    each = wanted.sum(dim=2)
    counts[0] += each.sum()
    counts[1] += miss.sum()
    counts[2] = torch.maximum(counts[2], each.max())
    slots = torch.where(hit, slot, torch.where(miss, victim.int(), -1))
    live = used[:, :, :count] == step
    return slots, torch.where(miss, rows, -1), live


def uva_gather(
    table: Sequence[Sequence[Tensor]], block_size: int, slab: Tensor, fetch: Tensor, slots: Tensor, offset: int
) -> None:
    """Copy row fetch[b, h, m] of sequence b to slab[b, h, offset + slots[b, h, m]]; fetch -1 skips.

    table[b][e]: block e of sequence b, a tensor [H, block_size, 2, D]; the kernel takes the blocks' addresses.
    """
    for b, h, m in (fetch >= 0).nonzero().tolist():
        row = int(fetch[b, h, m])
        slab[b, h, offset + int(slots[b, h, m])] = table[b][row // block_size][h, row % block_size].to(slab)


def in_place(
    selected: Selected, blocks: Sequence[Sequence[Tensor]], keys: Tensor, values: Tensor, held: int
) -> tuple[Tensor, Tensor]:
    """Return keys and values [B, H, held + M, D] of sink, ring and the selected rows; zeros for missing rows.

    keys, values [B, H, N, D]: a slab whose first `held` slots are sink and ring. blocks[b][e]: block e of sequence b, whose
    address the table has.
    """
    rows, format = selected.rows, selected.format or RowFormat(keys.shape[3], keys.dtype)
    there = keys.new_zeros((*rows.shape, 2, keys.shape[3]))
    lies = rows >= 0 if selected.slots is None else (rows >= 0) & (selected.slots < 0)
    for b, own in enumerate(blocks):
        for h in range(rows.shape[1] if own else 0):
            of_head = format.decode(torch.cat([block[h] for block in own]))
            there[b, h, lies[b, h]] = of_head[rows[b, h, lies[b, h]].long()]
    return pooled(there, selected, keys, values, held)


def topk(merged: Tensor, candidates: Tensor, k: int, first: int, floor: Floor | None = None) -> tuple[Tensor, Tensor]:
    """Return the rows of the k largest of merged [L, H, width], and counts [L, H].

    The rows [L, H, k] int32 are ascending positions + first, -1 padded.

    candidates [L, H, width] int32: ascending positions, -1 padded, where merged is -inf.
    floor: as of the kernel.
    """
    return positions(heaviest(merged, candidates, k, floor), candidates, k, first)
