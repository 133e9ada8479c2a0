"""The state of a sequence in an index: which there are, which event moves which to which, and an index that is built apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from kvthaw.cache.host import HostStore
from kvthaw.cache.index_api import Index
from kvthaw.cache.streams import Streams
from kvthaw.errors import CacheError


@dataclass(frozen=True, slots=True)
class Ready:
    """The index may be searched for the sequence."""


@dataclass(frozen=True, slots=True)
class Waiting(Ready):
    """commit() appends the tokens of the prompt step under way, up to `end`, with the prompt's last queries."""

    end: int
    queries: Tensor


@dataclass(frozen=True, slots=True)
class Stale:
    """The index has nothing of the sequence that may be searched. The sequence is indexed again before the next step."""


class SideIndex:
    """As Stale, while an index of this sequence alone is built on the host. The index that steps search then takes it over.

    Its changes run in order on a build thread, for which neither searches nor updates of other sequences wait. Each reads the
    rows that the store had when change() was called: the store may drop them meanwhile.

    end: the position up to which it is given tokens.
    index: an index whose states may be kept (`Traits.snapshots`), over a view of the store.
    make: makes the index over a store.
    group: number of the layer group, see Streams.build.
    """

    def __init__(self, make: Callable[[HostStore], Index], seq: int, store: HostStore, streams: Streams, group: int) -> None:
        self.end, self._wanted, self._view = 0, True, store.view()
        self.index, self._seq, self._store, self._streams, self._group = make(self._view), seq, store, streams, group
        self._changes: list[Future[None]] = []

    def change(self, end: int, change: Callable[..., None], *given: Any) -> None:
        """Queue a call of an index method for when the rows appended so far are in the store.

        end: where the index ends afterwards.
        """
        blocks, length = self._store.blocks(self._seq), self._store.length(self._seq)

        def run() -> None:
            try:
                if self._wanted:
                    self._view.hold(self._seq, blocks, length)
                    change(*given)
            finally:  # until now blocks are held, so that they are not freed
                self._view.hold(self._seq, (), 0)
                blocks.clear()

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


State = Ready | Stale | SideIndex
READY, STALE = Ready(), Stale()
Event = Literal["append", "build", "wait", "expire", "start", "take", "cancel", "truncate", "empty", "fail", "undo"]
TRANSITIONS: Mapping[Event, Mapping[type[State], type[State]]] = {
    "append": {Ready: Ready, Waiting: Ready},  # tokens from the watermark on
    "build": {Ready: Ready, Waiting: Ready, Stale: Ready},  # all tokens, or load them
    "wait": {Ready: Waiting, Waiting: Waiting},  # for commit()
    "expire": {Ready: Stale, Waiting: Stale, Stale: Stale},  # too little is indexed, or nothing
    "start": {Waiting: SideIndex, Stale: SideIndex, SideIndex: SideIndex},  # to build a SideIndex, or to change it
    "take": {SideIndex: Ready},  # it over
    "cancel": {SideIndex: Stale},
    "truncate": {Ready: Ready, Waiting: Ready, Stale: Stale},  # some positions stay
    "empty": {Ready: Ready, Waiting: Ready, Stale: Ready},  # none stay
    "fail": {Ready: Stale, Waiting: Stale, Stale: Stale},  # to build or to load
    "undo": {Waiting: Ready, Stale: Ready},  # what a step that failed had moved
}
"""Where each event leads from each state. A sequence is Waiting after its step only if commit() failed before it."""


@dataclass(slots=True)
class IndexedSequence:
    """A sequence in an index.

    first: the end of the sink, where the positions that are indexed begin.
    upto: the watermark, the position up to which the index has tokens, stale or not.
    last: where the latest append began; None: undo() cannot undo it.
    before: what a failed step returns the sequence to, Ready or Stale; None: this step has not moved it.
    """

    seq: int
    first: int
    upto: int
    state: State = READY
    last: int | None = None
    before: State | None = None

    def move(self, event: Event, to: State, *, in_step: bool = False) -> None:
        """Change the state. Raises CacheError if the event does not lead from one to the other.

        in_step: drop() undoes it, unless the sequence moves again outside of the step.
        """
        if TRANSITIONS[event].get(type(self.state)) is not type(to):
            names = f"{type(self.state).__name__} to {type(to).__name__}"
            raise CacheError(f"sequence {self.seq} of an index: {event!r} does not lead from {names}")
        self.before = (self.before or (READY if isinstance(self.state, Ready) else STALE)) if in_step else None
        self.state = to

    def cancel(self) -> None:
        """Cancel the SideIndex, if there is one. The sequence stays stale."""
        if isinstance(self.state, SideIndex):
            self.state.drop()
            self.move("cancel", STALE)

    def fail(self) -> None:
        """Record that the index may have any part of the sequence. A step that fails does not undo that."""
        self.cancel()
        self.move("fail", STALE)
        self.upto, self.last = self.first, None
