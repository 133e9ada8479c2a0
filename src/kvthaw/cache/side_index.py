"""An index of one sequence that is built beside the steps of the others."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from kvthaw.cache.host import HostStore
from kvthaw.cache.index_api import Index, Snapshots
from kvthaw.cache.streams import Streams


class SideIndex:
    """An index on the host that holds one sequence of a layer, until the index that steps search takes it over.

    It changes on a thread that neither searches nor updates of other sequences wait for, in the order of the calls. end: the
    position up to which it is given tokens. index: an Index with Snapshots. group: of the layer, as for Streams.build.
    """

    def __init__(self, index: Any, seq: int, store: HostStore, streams: Streams, group: int) -> None:
        self.end, self._wanted = 0, True
        self.index, self._seq, self._store, self._streams, self._group = index, seq, store, streams, group
        self._changes: list[Future[None]] = []

    def change(self, end: int, change: Callable[..., None], *given: Any) -> None:
        """Call a method of the index once the rows appended so far are in the store. end: where it ends then."""
        blocks = self._store.blocks(self._seq)

        def run() -> None:
            if self._wanted:
                change(*given)
            blocks.clear()  # they must not go meanwhile

        self._changes.append(self._streams.build(self._store.arriving, run, self._group))
        self.end = end

    def wait(self, timeout: float | None) -> bool:
        """Wait at most so many seconds for the changes, None: as long as it takes. Returns whether all have ended."""
        return not wait(self._changes, timeout).not_done

    def snapshot(self) -> Any:
        """Return what the index holds. Waits for its changes; raises what one of them raised."""
        for change in self._changes:
            change.result()
        return self.index.snapshot(self._seq)

    def drop(self) -> None:
        """Make no more changes. The one under way ends by itself."""
        self._wanted = False
        for change in self._changes:
            change.cancel()


def can_build_beside(index: Index) -> bool:
    """Return whether a sequence of an index can be built apart and taken over."""
    return index.on_host and isinstance(index, Snapshots)
