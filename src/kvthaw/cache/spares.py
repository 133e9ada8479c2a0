"""Whose turn it is to take host memory for coming tokens."""

from __future__ import annotations

from collections.abc import Iterable

from kvthaw.cache.host import HostStore
from kvthaw.cache.pipeline import Pipeline
from kvthaw.regions import Regions


class Spares:
    """The extents of the host's that the lanes of one layer take before they need them, each lane in its turn.

    Page-locking one takes 1.5 ms, and lanes of one length would ask for theirs in all layers at one token. So every lane of every
    layer has a turn of its own, by its number, one or two of them a step, and comes round before an extent is full.
    """

    def __init__(self, number: int, pipeline: Pipeline) -> None:
        self._number, self._pipeline = number, pipeline
        self._steps = 0  # tokens that were taken one by one; all layers count alike
        self._next = 0  # the step at which a lane may have its turn again

    def count_step(self) -> None:
        """A token of every lane was taken."""
        self._steps += 1

    def reorder(self) -> None:
        """Lanes have changed."""
        self._next = 0

    @property
    def due(self) -> bool:
        """Whether it may be some lane's turn."""
        return self._steps >= self._next

    def turns(self, store: HostStore, regions: Regions) -> Iterable[int]:
        """The lanes whose turn it is now."""
        lanes, rounds = store.lanes, self._round(store, regions)
        at = (self._steps - self._number * lanes) % rounds
        self._next = self._steps + (1 if at + 1 < lanes else rounds - at)
        return range(at, lanes, rounds)

    def take(self, store: HostStore, regions: Regions, lane: int, length: int) -> None:
        """Take one for a lane, which has so many tokens, if it may need it before its next turn."""
        steps = store.reserved(lane) + regions.window + 1 - length  # until it is needed, or some more
        if steps < self._round(store, regions):
            self._pipeline.spare(store, lane)

    def _round(self, store: HostStore, regions: Regions) -> int:
        """Steps after which every lane of every layer has had its turn."""
        return min(self._pipeline.layers * store.lanes, max(1, store.extent // 2, store.extent - regions.buffer))
