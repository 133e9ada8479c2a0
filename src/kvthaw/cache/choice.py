"""What a decode step of a layer group attends to."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from kvthaw.cache.index_api import Selection


@dataclass(frozen=True, slots=True)
class Choice:
    """The rows that one decode step of a layer group attends to, and their pool slots.

    All tensors but `host` are on the device. slots, fetch and live are None if attention reads every row in its block.

    slots: [B, H, M] int32, the pool slot of each selected row. -1 pads, and marks rows that attention reads in their
        blocks.
    fetch: [B, H, M] int32, the rows to fetch, else -1.
    live: [B, H, C] bool, slots that hold a selected row.
    host: slots and fetch on the CPU too, if the index works there and the query is on a GPU.
    """

    selection: Selection
    slots: Tensor | None = None
    fetch: Tensor | None = None
    live: Tensor | None = None
    host: tuple[Tensor, Tensor] | None = None

    @property
    def followed(self) -> Choice:
        """The choice for a layer that follows an anchor: rows and slots. Weights and partials are dropped, as they depend on
        the anchor's keys."""
        return replace(self, selection=Selection(self.selection.rows, self.selection.counts))
