"""Selected rows that attention reads where they lie: in the slots of a slab, or in their blocks on device or host.

The kernel finds a row through its slot, if it has one, else through the table of block addresses. The launch reads the
table, so a block that moves between two steps changes only the table. Per selected row a step reads 8 bytes for row and
slot, 8 for the address of its block, and the row itself. The L1 cache mostly has the address. 24 sequences of 8 heads and
788 rows of 512 bytes read 77 MB, 23 us at 3.35 TB/s. Copying the rows to the slab first would write and read them once
more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.decode_step import InSlab
from kvthaw.kernels.places import Newest
from kvthaw.kernels.row_format import RowFormat
from kvthaw.native import gather_rows
from kvthaw.regions import Regions


@dataclass(frozen=True, slots=True)
class Selected:
    """Rows that a step attends to, and where they lie.

    rows: [B, H, M] int32, -1 for none.
    slots: [B, H, M] int32, the row's slot in the slab, counted behind sink and ring. -1: the row is read from its block.
    None: all are.
    table: [B, blocks] int64, addresses of blocks [H, block_size, *tail].
    format: row format of the blocks; None: that of the slab.
    tally: (counts, totals), or None to count nothing. counts [B, H] int32 is the number of rows of each head. The step adds
    them to totals [4] int64 as `admit` does where rows have no slots.
    """

    rows: Tensor
    slots: Tensor | None
    table: Tensor
    block_size: int
    tally: tuple[Tensor, Tensor] | None = None
    format: RowFormat | None = None

    def gather(self, keys: Tensor, values: Tensor, held: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of `pooled`, by C++ and for blocks in the CPU's memory, and count the rows."""
        batch, heads, _, dim = keys.shape
        rows = self.rows if self.slots is None else torch.where(self.slots < 0, self.rows, -1)
        format, found = self.format or RowFormat(dim, keys.dtype), torch.zeros((rows.numel(), 2, dim), dtype=keys.dtype)
        stored = torch.empty((len(found), *format.tail), dtype=format.stored)
        count, which = gather_rows(self.table, self.block_size, rows.contiguous(), stored)
        found[which] = format.decode(stored[:count])
        there = found.view(batch, heads, -1, 2, dim)
        if self.tally is not None:
            counts, totals = self.tally
            totals[0] += counts.sum()
            totals[3] += counts.sum()
            totals[2] = torch.maximum(totals[2], counts.max())
        return pooled(there, self, keys, values, held)


@dataclass(frozen=True, slots=True)
class Every:
    """All rows between sink and ring, which lie in their blocks.

    width: places for rows, M, at least as many as any sequence has.
    table, block_size, format: see Selected.
    """

    width: int
    table: Tensor
    block_size: int
    format: RowFormat | None = None


@dataclass(frozen=True, slots=True)
class InPlace:
    """Sink and ring of a slab, as InSlab has them, and M rows that follow them and are read where they lie.

    The N of a step's log_weight is held + M.
    """

    regions: Regions
    lengths: Tensor
    starts: Tensor
    newest: Newest
    selected: Selected | Every

    def listed(self, heads: int) -> Selected:
        """Return the rows that each of `heads` KV heads selects, listed."""
        if isinstance(every := self.selected, Selected):
            return every
        row = self.regions.sink + torch.arange(every.width, dtype=torch.int32, device=self.starts.device)
        rows = torch.where(row < self.starts[:, None], row, -1)[:, None].expand(-1, heads, -1).contiguous()
        return Selected(rows, None, every.table, every.block_size, format=every.format)

    def copied(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, InSlab]:
        """Write the newest tokens to keys and values [B, H, N, D] of a slab on the CPU, and copy the selected rows.

        Returns keys and values [B, H, held + M, D], and the same places of these.
        """
        selected = self.listed(keys.shape[1])
        slab = InSlab(self.regions, self.lengths, self.starts, self.newest, selected.rows >= 0)
        slab.write(keys, values)
        return *selected.gather(keys, values, self.regions.held), slab


def pooled(there: Tensor, selected: Selected, keys: Tensor, values: Tensor, held: int) -> tuple[Tensor, Tensor]:
    """Return keys and values of sink and ring, followed by the M selected rows, read from their slots or their blocks."""
    parts = []
    for slab, read in ((keys, there[:, :, :, 0]), (values, there[:, :, :, 1])):
        if selected.slots is not None and slab.shape[2] > held:
            at = selected.slots.clamp(min=0).long()[..., None].expand_as(read)
            read = torch.where(selected.slots[..., None] >= 0, slab[:, :, held:].gather(2, at), read)
        parts.append(torch.cat((slab[:, :, :held], read), dim=2))
    return parts[0], parts[1]


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def picks(rows, slots, place, end, held, first):
        # Load the selected rows in these columns of a step, -1 for none, and their slots, or the rows again where none has one.
        # Without rows all from the first one on are selected.
        behind = (place >= held) & (place < end)
        row = tl.where(behind, first + place - held, -1)
        if rows is not None:
            row = tl.load(rows + (place - held), mask=behind, other=-1)
        slot = row
        if slots is not None:
            slot = tl.load(slots + (place - held), mask=behind, other=-1)
        return row, slot

    @triton.jit
    def addresses(
        keys, row, slot, table, place, held, h, row_bytes, stored_bytes, block_size, head_bytes, POOLED: tl.constexpr,
    ):  # fmt: skip
        # Return the byte addresses of the keys in these columns of a step, int64, and which keys lie in blocks. Columns
        # below `held` lie in the slab. The others are selected rows; if POOLED, some of them have slots. Address 0: there
        # is no row.
        base = keys.to(tl.int64)
        address = tl.where(place < held, base + place.to(tl.int64) * row_bytes, 0)
        lies = row >= 0
        if POOLED:
            address = tl.where(slot >= 0, base + (held + slot).to(tl.int64) * row_bytes, address)
            lies = lies & (slot < 0)
        number = row // block_size
        block = tl.load(table + number, mask=lies, other=0)
        there = block + h * head_bytes + (row - number * block_size).to(tl.int64) * stored_bytes
        return tl.where(lies, there, address), lies
