"""The states of a sequence in an index; an index of one sequence that is built while the others take steps."""

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
    """An index on the host that holds one sequence of a layer, until the index that steps search takes it over.

    It changes on a thread that neither searches nor updates of other sequences wait for, in the order of the calls. end: the
    position up to which it is given tokens. index: one with snapshots. group: of the layer, as for Streams.build.
    """

    def __init__(self, index: Index, seq: int, store: HostStore, streams: Streams, group: int) -> None:
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
        """Wait at most `timeout` seconds for the changes; None: without a limit. Returns whether all have ended."""
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


class State(Enum):
    """What the index has of a sequence."""

    INDEXED = auto()
    """All positions up to the watermark; none where that is the end of the sink."""
    APPENDING = auto()
    """The same. commit() appends what the prompt step under way brings."""
    STALE = auto()
    """Nothing that may be searched. The sequence is indexed again before the next step."""
    BUILDING = auto()
    """The same, while a SideIndex is built, until take_built()."""


_NEXT = {
    State.INDEXED: {State.INDEXED, State.APPENDING, State.STALE},
    State.APPENDING: {State.INDEXED, State.APPENDING, State.STALE, State.BUILDING},
    State.STALE: {State.INDEXED, State.STALE, State.BUILDING},
    State.BUILDING: {State.INDEXED, State.STALE, State.BUILDING},
}
"""The states that may follow each state."""


@dataclass(slots=True)
class IndexedSequence:
    """The state of a sequence in an index, and what belongs to the state.

    upto: the watermark, the position up to which the index has been given tokens. last: where the latest append began; None: undo()
    cannot take it back. coming: of APPENDING, the watermark after it and the last queries. side: of BUILDING. before: the state
    before the step under way, where this step has changed it; drop() returns to it.
    """

    upto: int
    state: State = State.INDEXED
    last: int | None = None
    coming: tuple[int, Tensor] | None = None
    side: SideIndex | None = None
    before: State | None = None

    def enter(self, state: State, *, in_step: bool = False) -> None:
        """Go to a state. in_step: drop() takes it back."""
        assert state in _NEXT[self.state], f"from {self.state} to {state}"
        self.before = self.state if in_step and self.before is None else self.before
        self.state = state
        if state is not State.APPENDING:
            self.coming = None

    def drop_side(self) -> None:
        """Go from BUILDING to STALE."""
        if self.side is not None:
            self.side.drop()
            self.side = None
            self.enter(State.STALE)


def can_build_beside(index: Index) -> bool:
    """Return whether a sequence of an index can be built apart and taken over."""
    return index.traits.on_host and index.traits.snapshots
