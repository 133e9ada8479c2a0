"""What a decode step of a layer group attends to."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from kvthaw.cache.index_api import Selection


@dataclass(frozen=True, slots=True)
class Choice:
    """The rows that one decode step of a group attends to, and their slots.

    slots [B, H, M] int32: the pool slot of every selected row, -1 padded, and -1 for rows that are read in their blocks. fetch [B,
    H, M] int32: the rows to bring, else -1. live [B, H, C] bool: slots that hold a selected row. All on the device, all None where
    every row is read in its block; host: slots and fetch on the CPU too, if the index works there and the query does not.
    """

    selection: Selection
    slots: Tensor | None = None
    fetch: Tensor | None = None
    live: Tensor | None = None
    host: tuple[Tensor, Tensor] | None = None

    @property
    def followed(self) -> Choice:
        """The choice for a follower: rows and slots, without weights and partials, which belong to the anchor's keys."""
        return replace(self, selection=Selection(self.selection.rows, self.selection.counts))
