"""Count the rows that a layer group selected and fetched."""

from __future__ import annotations

from kvthaw.cache.index_api import IndexContext
from kvthaw.cache.residency import Residency


class Meter:
    """Counts of rows that a group selected and fetched over all steps. Only reading them syncs the host."""

    def __init__(self, residency: Residency, context: IndexContext) -> None:
        self._residency, self._context = residency, context
        self.again = 0

    @property
    def steps(self) -> int:
        """Number of selections, one per KV head, sequence and decoded token."""
        sequences = self._context.sequences
        return self._context.kv_heads * ((0 if sequences is None else sequences.held.steps) + self.again)

    def tick(self, sequences: int) -> None:
        """Count the queries of another layer that shares the anchor's keys."""
        self.again += sequences

    @property
    def selected(self) -> int:
        """Rows selected."""
        return int(self._residency.counts[0])

    @property
    def fetched(self) -> int:
        """Rows fetched to the pool, counted once for the group. Each layer of the group fetches them."""
        return int(self._residency.counts[1])

    @property
    def in_place(self) -> int:
        """Rows that attention read in blocks on the device."""
        return int(self._residency.counts[3])

    @property
    def most(self) -> int:
        """The most rows that a KV head selected in a step."""
        return int(self._residency.counts[2])
