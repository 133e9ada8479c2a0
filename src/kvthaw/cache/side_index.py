"""States of a sequence in an index, and an index of one sequence that is built concurrently with the steps of others."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from torch import Tensor

from kvthaw.cache.host import HostStore
from kvthaw.cache.index_api import Index
from kvthaw.cache.streams import Streams


class SideIndex:
    """An index on the host of one sequence of a layer, built until the index that steps search takes it over.

    Its changes run in order on a build thread, for which neither searches nor updates of other sequences wait.

    end: the position up to which it is given tokens.
    index: an index whose states may be kept (`Traits.snapshots`).
    group: number of the layer group, see Streams.build.
    """

    def __init__(self, index: Index, seq: int, store: HostStore, streams: Streams, group: int) -> None:
        self.end, self._wanted = 0, True
        self.index, self._seq, self._store, self._streams, self._group = index, seq, store, streams, group
        self._changes: list[Future[None]] = []

    def change(self, end: int, change: Callable[..., None], *given: Any) -> None:
        """Queue a call of an index method for when the rows appended so far are in the store.

        end: where the index ends afterwards.
        """
        blocks = self._store.blocks(self._seq)

        def run() -> None:
            if self._wanted:
                change(*given)
            blocks.clear()  # held until now, so that they are not freed

        self._changes.append(self._streams.build(self._store.arriving, run, self._group))
        self.end = end

    def wait(self, timeout: float | None) -> bool:
        """Wait for the changes. Returns whether all have ended.

        timeout: at most this many seconds; None: without limit.
        """
        return not wait(self._changes, timeout).not_done

    def export(self) -> Any:
        """Return the state of the index. Waits for its changes, and raises the error of any that failed."""
        for change in self._changes:
            change.result()
        return self.index.export(self._seq)

    def drop(self) -> None:
        """Cancel the queued changes. A running one ends by itself."""
        self._wanted = False
        for change in self._changes:
            change.cancel()


class State(Enum):
    """How much of a sequence an index holds."""

    INDEXED = auto()
    """All positions up to the watermark, or none if the watermark is the end of the sink."""
    APPENDING = auto()
    """As INDEXED. commit() will append the tokens of the prompt step under way."""
    STALE = auto()
    """Nothing that may be searched. The sequence is indexed again before the next step."""
    BUILDING = auto()
    """As STALE, while a SideIndex is built, until take_built()."""


_NEXT = {
    State.INDEXED: {State.INDEXED, State.APPENDING, State.STALE},
    State.APPENDING: {State.INDEXED, State.APPENDING, State.STALE, State.BUILDING},
    State.STALE: {State.INDEXED, State.STALE, State.BUILDING},
    State.BUILDING: {State.INDEXED, State.STALE, State.BUILDING},
}
"""The states that may follow each state."""


@dataclass(slots=True)
class IndexedSequence:
    """The state of a sequence in an index.

    upto: the watermark, the position up to which the index has tokens.
    last: where the latest append began; None: undo() cannot undo it.
    coming: in state APPENDING, the next watermark and the last queries.
    side: in state BUILDING, the index being built.
    before: the state before the step under way, if this step has changed it. drop() returns to it.
    """

    upto: int
    state: State = State.INDEXED
    last: int | None = None
    coming: tuple[int, Tensor] | None = None
    side: SideIndex | None = None
    before: State | None = None

    def enter(self, state: State, *, in_step: bool = False) -> None:
        """Enter a state.

        in_step: drop() undoes it.
        """
        assert state in _NEXT[self.state], f"from {self.state} to {state}"
        self.before = self.state if in_step and self.before is None else self.before
        self.state = state
        if state is not State.APPENDING:
            self.coming = None

    def drop_side(self) -> None:
        """Cancel the SideIndex, if there is one, and return to STALE."""
        if self.side is not None:
            self.side.drop()
            self.side = None
            self.enter(State.STALE)


def can_build_beside(index: Index) -> bool:
    """Return whether sequences of an index can be built separately and then swapped in."""
    return index.traits.on_host and index.traits.snapshots
