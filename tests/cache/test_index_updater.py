"""What an index is given: the right positions, from wherever their keys are, by one call."""

from __future__ import annotations

import threading
import weakref
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvthaw.cache.host import HostStore
from kvthaw.cache.index_api import Traits
from kvthaw.cache.index_updater import (
    READY,
    STALE,
    TRANSITIONS,
    Event,
    IndexedSequence,
    IndexUpdater,
    Ready,
    SideIndex,
    Stale,
    State,
    Waiting,
)
from kvthaw.cache.layer_base import IndexState, RecentQueries
from kvthaw.cache.pool import Slab
from kvthaw.cache.sequences import Sequences
from kvthaw.cache.step import Row
from kvthaw.cache.streams import Streams
from kvthaw.errors import CacheError
from kvthaw.regions import Regions

SINK, HEADS, DIM = 2, 2, 4


class Recorder:
    """An index and its group: keeps what it is given."""

    def __init__(self, grows: bool, on_host: bool = False) -> None:
        self.traits, self.index = Traits(grows=grows, on_host=on_host, snapshots=on_host), self
        self.calls: list[tuple[str, Any, Tensor, int]] = []
        self.rows = torch.empty(0)  # of every sequence, in the store
        self.streams, self.group, self.counts = Streams(), 0, 0
        self.context = SimpleNamespace(q_heads=HEADS, head_dim=DIM)

    def submit(self, after: object, job: Any, failed: Any) -> None:
        try:
            job()
        except BaseException:
            failed()
            raise

    def given(self, rows: Tensor) -> Tensor:
        return rows[..., :0] if self.traits.on_host else rows

    def stored(self, seq: int, start: int, stop: int) -> Tensor:
        return self.given(self.rows[:, start:stop])

    def build(self, seq: int, first: int, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        assert first == SINK
        self.calls.append(("build", seq, keys, queries.shape[1]))

    def append(self, seqs: list[int], keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        self.calls.append(("append", seqs, keys, -1 if queries is None else queries.shape[2]))

    def fresh_index(self, store: HostStore) -> Recorder:
        return Recorder(self.traits.grows, self.traits.on_host)

    def branch(self) -> Any:
        return lambda lengths: None

    def export(self, seq: int) -> str:
        return "state"

    def load(self, seq: int, held: object, end: int) -> None:
        self.calls.append(("load", seq, torch.empty(end), -1))

    def wait(self) -> None:
        pass

    def recover(self) -> None:
        pass

    def forget_step(self) -> None:
        pass

    def reorder(self, seqs: list[int]) -> None:
        self.calls.append(("reorder", seqs, torch.empty(0), -1))

    def truncate(self, seq: int, length: int, *, exactly: bool = False) -> None:
        self.calls.append(("truncate", seq, torch.empty(length), -1))


def an_updater(*, grows: bool, on_host: bool = False) -> tuple[IndexUpdater, Recorder, Tensor]:
    """An updater, its index, and 30 rows [H, 30, 2, D], all in the store; in the slab the sink and 12 .. 20."""
    index, store = Recorder(grows, on_host), HostStore(2, HEADS, DIM, torch.float32, block_size=8)
    slab = Slab(2, HEADS, DIM, Regions(SINK, 4, 4), 1, dtype=torch.float32, device=torch.device("cpu"))
    rows = index.rows = torch.randn(HEADS, 30, 2, DIM)
    for seq in range(2):
        store.append(seq, rows)
        slab.write(seq, 0, rows[:, :SINK])
        slab.write(seq, 12, rows[:, 12:20])
    return IndexUpdater(index, store, slab, Sequences(), RecentQueries(3)), index, rows  # type: ignore[arg-type]


def prompt(updater: IndexUpdater, seq: int, rows: Tensor, start: int, stop: int, remaining: int = 0) -> Tensor:
    """A chunk of a prompt, positions start .. stop. Returns its queries."""
    queries = torch.randn(HEADS, 3, DIM)
    updater.prompt(Row(seq, seq, 0, stop - start, start), rows[:, start:stop, 0], rows[:, start:stop, 1], queries, remaining)
    return queries


def upto(updater: IndexUpdater, *ends: int) -> None:
    """The index has been given that much of each sequence."""
    for own, end in zip(updater._of, ends, strict=True):
        own.upto = end


def flush(updater: IndexUpdater, rows: Tensor, *leaving: tuple[int, int, int]) -> None:
    """Tokens (sequence, start, stop) leave their rings; their rows come with them."""
    updater.flush([(*each, each[2]) for each in leaving], torch.stack([rows[:, at:end] for _, at, end in leaving]))


@pytest.mark.parametrize("old", [SINK, 12])
def test_positions_come_from_the_ring_and_the_pass(old: int) -> None:
    updater, index, rows = an_updater(grows=True)
    start = 20 if old > SINK else 0
    updater._of[0].upto = old
    prompt(updater, 0, rows, start, 30)
    (call, _, keys, width), *rest = index.calls
    assert (call, width, rest) == ("build" if old == SINK else "append", 3, [])
    assert torch.equal(keys.reshape(HEADS, -1, DIM), rows[:, old:26, 0])


def test_a_sequence_that_chunks_make_much_longer_is_indexed_once_and_whole() -> None:
    updater, index, rows = an_updater(grows=False)
    prompt(updater, 1, rows, 0, 16, 14)
    updater.recent_queries[1] = prompt(updater, 1, rows, 20, 30)
    assert (index.calls, updater.stale) == ([], {1})
    updater.renew({1: 26})
    (call, seq, keys, width), *rest = index.calls
    assert (call, seq, width, rest, updater.stale) == ("build", 1, 3, [], set())
    assert torch.equal(keys, rows[:, SINK:26, 0])


def test_what_leaves_rings_goes_in_one_append_but_for_sequences_that_had_none() -> None:
    updater, index, rows = an_updater(grows=True)
    upto(updater, 12, 12)
    for _ in range(2):  # what it was given is not given again
        flush(updater, rows, (0, 12, 16), (1, 12, 16))
    upto(updater, 16, SINK)
    flush(updater, rows, (1, SINK, SINK + 2))
    (first, seqs, keys, none), (second, seq, _, width) = index.calls
    assert (first, seqs, none) == ("append", [0, 1], -1)
    assert torch.equal(keys, rows[:, 12:16, 0].expand(2, -1, -1, -1))
    assert (second, seq, width) == ("build", 1, 0), "a sequence without a prompt has no last queries"
    index.calls.clear()
    upto(updater, 16, 12)
    flush(updater, rows, (0, 12, 16), (1, 12, 16))
    assert [call[1] for call in index.calls] == [[1]], "what one has already is given to the other alone"
    assert torch.equal(index.calls[0][2][0], rows[:, 12:16, 0])


def test_an_index_on_the_host_is_given_numbers_only() -> None:
    updater, index, rows = an_updater(grows=False, on_host=True)
    prompt(updater, 0, rows, 0, 30)
    flush(updater, rows, (0, 26, 30))
    assert [call[2].shape for call in index.calls] == [(HEADS, 24, 0), (1, HEADS, 4, 0)]


def test_what_an_index_did_not_take_is_given_again() -> None:
    updater, index, rows = an_updater(grows=True)
    upto(updater, 12, 12)
    append = index.append

    def fail(*args: Any) -> None:
        raise MemoryError("no more")

    index.append = fail  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        flush(updater, rows, (0, 12, 16))
    index.append = append  # type: ignore[method-assign]
    flush(updater, rows, (0, 12, 16))
    assert [call[:2] for call in index.calls] == [("truncate", 0), ("append", [0])]
    assert [updater.indexed(seq) for seq in range(2)] == [16, 12]


def test_an_append_that_fails_on_the_worker_is_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    updater, index, rows = an_updater(grows=True)
    upto(updater, 12, 12)
    failures: list[Any] = []
    monkeypatch.setattr(index, "submit", lambda after, job, failed: failures.append(failed))
    flush(updater, rows, (0, 12, 16))
    flush(updater, rows, (0, 16, 20))
    for failed in reversed(failures):
        failed()
    assert [updater.indexed(seq) for seq in range(2)] == [12, 12]


@pytest.mark.parametrize("how", ["clear", "crop", "reorder", "fails"])
def test_an_append_that_waits_for_its_step_goes_with_its_sequence(how: str) -> None:
    """An index on the host is given a prompt's tokens once the step is counted; the sequence may leave or move before."""
    updater, index, rows = an_updater(grows=True, on_host=True)
    upto(updater, 12, 12)
    prompt(updater, 0, rows, 16, 18)
    match how:
        case "clear":
            updater.clear(0)
        case "crop":
            updater.truncate(0, 8)
        case "reorder":
            updater.reorder([1, 0])
        case "fails":
            updater.drop()
    index.calls.clear()
    updater.commit()
    assert [call[:2] for call in index.calls] == ([("append", [1])] if how == "reorder" else [])
    assert [updater.indexed(seq) for seq in range(2)] == {
        "clear": [SINK, 12], "crop": [8, 12], "reorder": [12, 14], "fails": [12, 12],
    }[how]  # fmt: skip


@pytest.mark.parametrize("then", ["commit", "drop"])
@pytest.mark.parametrize("stale", [False, True])
def test_a_step_that_fails_returns_each_sequence_to_its_state(stale: bool, then: str) -> None:
    """One that was to be indexed again still is; one that the step marked is not."""
    updater, _, rows = an_updater(grows=False)
    if stale:
        updater.begin_again(1)
    else:
        upto(updater, SINK, 12)
    prompt(updater, 1, rows, 20, 30)
    assert updater.stale == {1}
    if stale:
        updater.begin({1: 26}, {1: rows})
        assert updater.stale == set()
    getattr(updater, then)()
    assert updater.stale == ({1} if stale == (then == "drop") else set())
    assert updater.indexed(1) == (SINK if then == "drop" else 26) if stale else 12


def test_a_sequence_without_positions_to_index_is_not_built() -> None:
    """The first build failed, and the sequence was cropped to less than the sink."""
    updater, index, _ = an_updater(grows=True)
    upto(updater, SINK, SINK)
    updater.begin_again(0)
    updater.store.truncate(0, SINK - 1)
    updater.renew({0: SINK})
    assert "build" not in [call[0] for call in index.calls]
    assert updater.stale == set()


def test_tokens_whose_commit_failed_are_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another sequence's update has failed, which commit() finds. The tokens then come with the next step."""
    updater, index, rows = an_updater(grows=True, on_host=True)
    upto(updater, 12, 12)
    updater.sequences.paused = frozenset({0})
    prompt(updater, 0, rows, 16, 18)

    def fail() -> None:
        raise CacheError("a key is not finite")

    with monkeypatch.context() as patch:
        patch.setattr(index, "wait", fail)
        with pytest.raises(CacheError):
            updater.commit()
    updater.sequences.paused = frozenset()
    updater.renew({0: 14})
    flush(updater, rows, (0, 14, 18))
    updater.commit()
    assert [(call[0], call[2].shape[-2]) for call in index.calls] == [("append", 2), ("append", 4)]
    assert updater.indexed(0) == 18


def test_a_state_that_could_not_be_loaded_is_missing_after_a_step_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker fails during the step. Its failure outlasts the step: the index has nothing of the sequence."""
    updater, index, rows = an_updater(grows=True, on_host=True)
    jobs: list[Any] = []
    monkeypatch.setattr(index, "submit", lambda after, job, failed: jobs.append(failed))
    monkeypatch.setattr(index, "recover", lambda: jobs.pop()())
    updater.load(0, 12, IndexState({}, SINK, 12))
    assert updater.indexed(0) == 12
    prompt(updater, 0, rows, 16, 18)
    updater.drop()
    assert updater.stale == {0}


KINDS = {kind.__name__: kind for kind in (Ready, Waiting, Stale, SideIndex)}
AFTER: dict[str, tuple[Any, str]] = {
    "prompt": (lambda updater, rows: prompt(updater, 0, rows, 20, 30), "Waiting Waiting Stale SideIndex"),
    "commit": (lambda updater, _: updater.commit(), "Ready SideIndex Stale SideIndex"),
    "drop": (lambda updater, _: updater.drop(), "Ready Ready Stale Stale"),
    "begin": (lambda updater, _: updater.begin({0: 26}, {}), "Ready Waiting SideIndex SideIndex"),
    "flush": (lambda updater, rows: flush(updater, rows, (0, 12, 16)), "Ready Ready - -"),
    "renew": (lambda updater, _: updater.renew({0: 26}), "Ready Ready Ready SideIndex"),
    "append what is missing": (lambda updater, _: updater.renew({0: 14}), "Ready Ready Ready SideIndex"),
    "rebuild": (lambda updater, _: updater.rebuild(0, 26), "Ready Ready Ready -"),
    "take_built": (lambda updater, _: updater.take_built(0), "Ready Waiting Stale Ready"),
    "rollback": (lambda updater, _: updater.rollback(0, 8), "Ready Ready Stale SideIndex"),
    "truncate": (lambda updater, _: updater.truncate(0, 8), "Ready Ready Stale Stale"),
    "truncate to the sink": (lambda updater, _: updater.truncate(0, SINK), "Ready Ready Ready Ready"),
    "begin_again": (lambda updater, _: updater.begin_again(0), "Stale Stale Stale Stale"),
    "clear": (lambda updater, _: updater.clear(0), "Ready Ready Ready Ready"),
    "reorder": (lambda updater, _: updater.reorder([0, 1]), "Ready Waiting Stale Stale"),
    "branch": (lambda updater, _: updater.branch()(), "Ready Waiting Stale SideIndex"),
    "load": (lambda updater, _: updater.load(0, 12, IndexState({}, SINK, 12)), "Ready Ready Ready -"),
    "load nothing": (lambda updater, _: updater.load(0, 20, None), "Stale Stale Stale -"),
    "fail": (lambda updater, _: updater._of[0].fail(), "Stale Stale Stale Stale"),
}
"""Where each operation leads a paused sequence from each of KINDS; - is an error."""


def brought_to(kind: str, updater: IndexUpdater, rows: Tensor) -> None:
    """Bring sequence 0, which is paused, to a state, by the step under way except for Stale."""
    updater.sequences.paused = frozenset({0})
    upto(updater, 12, 12)
    if kind == "Waiting":
        prompt(updater, 0, rows, 16, 18)
    elif kind != "Ready":
        updater.begin_again(0)
        updater.begin({0: 12} if kind == "SideIndex" else {}, {})
    assert type(updater._of[0].state) is KINDS[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", AFTER)
def test_an_operation_leads_from_each_state_where_it_should(operation: str, kind: str) -> None:
    updater, _, rows = an_updater(grows=True, on_host=True)
    brought_to(kind, updater, rows)
    operate, after = AFTER[operation]
    expected = dict(zip(KINDS, after.split(), strict=True))[kind]
    if expected == "-":
        with pytest.raises(CacheError, match=rf"sequence 0 .*'\w+' does not lead from {kind} to \w+$"):
            operate(updater, rows)
        expected = kind
    else:
        operate(updater, rows)
    assert type(updater._of[0].state) is KINDS[expected]


@pytest.mark.parametrize("event", TRANSITIONS)
def test_an_event_leads_nowhere_else(event: Event) -> None:
    updater, *_ = an_updater(grows=True, on_host=True)
    updater.begin_again(1)
    states: list[State] = [READY, Waiting(14, torch.empty(0)), STALE, updater._side(1)]
    for before, after in product(states, states):
        own = IndexedSequence(3, SINK, 12, before)
        if TRANSITIONS[event].get(type(before)) is type(after):
            own.move(event, after, in_step=True)
            assert (own.state, own.before) == (after, READY if isinstance(before, Ready) else STALE)
            continue
        names = f"{type(before).__name__} to {type(after).__name__}"
        with pytest.raises(CacheError, match=f"sequence 3 .*'{event}' does not lead from {names}"):
            own.move(event, after)
        assert own.state is before


@pytest.mark.parametrize("failing", [False, True])
def test_a_build_thread_reads_the_rows_of_when_it_was_asked(failing: bool) -> None:
    """The sequence leaves, and another takes its place, before a queued change runs."""
    store, streams, go, read = (
        HostStore(2, HEADS, DIM, torch.float32, block_size=8),
        Streams(),
        threading.Event(),
        list[Tensor](),
    )
    old, new = torch.randn(2, HEADS, 20, 2, DIM)
    store.append(1, old)

    class Reads:
        def __init__(self, own: HostStore) -> None:
            self.store = own

        def build(self, seq: int) -> None:
            assert go.wait(20)
            read.append(self.store.read(seq, 0, self.store.length(seq)).clone())
            if failing:
                raise CacheError("a key is not finite")

    index: Any = Reads
    side = SideIndex(index, 1, store, streams, 0)
    build: Any = side.index
    side.change(20, build.build, 1)
    kept = [weakref.ref(block.data) for block in store.blocks(1)]
    store.truncate(1, 0)
    store.append(1, new[:, :9])
    side.change(9, build.build, 1)
    go.set()
    assert side.wait(20)
    assert torch.equal(read[0], old)
    assert torch.equal(read[1], new[:, :9])
    assert all(block() is None for block in kept), "they are freed once they were read"
