"""The states of sequences in an index, whatever happens in whatever order: an index has what its watermarks say.

Jobs of the index run when they are waited for, as late as on a slow worker, and some fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from kvthaw.cache.host import HostStore
from kvthaw.cache.index_api import Traits
from kvthaw.cache.index_updater import IndexUpdater, Ready, SideIndex, Stale, Waiting
from kvthaw.cache.layer_base import IndexState, RecentQueries
from kvthaw.cache.pool import Slab
from kvthaw.cache.sequences import Sequences
from kvthaw.cache.step import Row
from kvthaw.cache.streams import Streams
from kvthaw.regions import Regions

SEQS, SINK, LONGEST = 3, 2, 80
REGIONS = Regions(SINK, 4, 4)
CPU = torch.device("cpu")
which, oneof = st.integers(0, SEQS - 1), st.sampled_from((False, False, False, True))


class BrokenError(Exception):
    """A call of the index, or the model, failed."""


class Lengths:
    """An index that knows how many positions it has of each sequence; -1: anything, after a call that failed."""

    def __init__(self, traits: Traits) -> None:
        self.traits, self.ends, self.breaks = traits, [SINK] * SEQS, False

    def _to(self, seq: int, end: int) -> None:
        if self.breaks:
            self.ends[seq], self.breaks = -1, False
            raise BrokenError
        self.ends[seq] = end

    def build(self, seq: int, first: int, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        self._to(seq, first + keys.shape[1])

    def append(self, seqs: Sequence[int], keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        if self.breaks or any(self.ends[seq] < 0 for seq in seqs):  # what it has of them it keeps
            self.breaks = False
            raise BrokenError
        for seq in seqs:
            self.ends[seq] += keys.shape[2]

    def load(self, seq: int, held: int, end: int) -> None:
        self._to(seq, min(held, end))

    def export(self, seq: int) -> int:
        return self.ends[seq]

    def truncate(self, seq: int, length: int) -> None:
        self.ends[seq] = min(self.ends[seq], length) if length else SINK


class Group:
    """A group of layers of such an index; see Retriever."""

    def __init__(self, traits: Traits) -> None:
        self.index, self.jobs, self.error = Lengths(traits), list[tuple[Any, Any]](), list[BrokenError]()
        self.context, self.streams, self.group = SimpleNamespace(q_heads=1, head_dim=1), Streams(), 0

    def submit(self, after: object, job: Callable[[], None], failed: Callable[[], None]) -> None:
        if self.index.traits.on_host:
            self.jobs.append((job, failed))
            return
        try:
            job()
        except BaseException:
            failed()
            raise

    def given(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[..., :0] if self.index.traits.on_host else rows

    def stored(self, seq: int, start: int, stop: int) -> torch.Tensor:
        return self.given(torch.empty(1, stop - start, 2, 1))

    def wait(self) -> None:
        jobs, self.jobs, after = self.jobs, [], []
        for job, failed in jobs:
            try:
                job()
            except BrokenError as error:
                self.error = [error]
                after.append(failed)
        for failed in reversed(after):
            failed()
        for error in self.error:
            raise error

    def recover(self) -> None:
        with suppress(BrokenError):
            self.wait()
        self.error = []

    def forget_step(self) -> None:
        pass

    def fresh_index(self, store: HostStore) -> Lengths:
        return Lengths(self.index.traits)

    def truncate(self, seq: int, length: int, *, exactly: bool = False) -> None:
        self.wait()
        self.index.truncate(seq, length)

    def reorder(self, seqs: Sequence[int]) -> None:
        self.wait()
        self.index.ends = [self.index.ends[seq] for seq in seqs]

    def branch(self) -> Callable[[Sequence[int]], None]:
        self.wait()
        before, self.index = self.index, Lengths(self.index.traits)
        self.index.ends = list(before.ends)

        def rejoin(lengths: Sequence[int]) -> None:
            self.recover()
            self.index = before

        return rejoin


class Updates(RuleBasedStateMachine):
    """Sequences whose prompts come in chunks, that are decoded, cropped, moved, dropped and paused, and whose steps fail."""

    @initialize(on_host=st.booleans(), grows=st.booleans(), snapshots=st.sampled_from((True, True, False)), light=st.booleans())
    def begin(self, on_host: bool, grows: bool, snapshots: bool, light: bool) -> None:
        self.group: Any = Group(Traits(on_host=on_host, grows=grows, snapshots=on_host and snapshots, light=light))
        self.store = HostStore(SEQS, 1, 1, torch.float32, block_size=8)
        slab = Slab(SEQS, 1, 1, REGIONS, 1, dtype=torch.float32, device=CPU)
        self.updater = IndexUpdater(self.group, self.store, slab, Sequences(), RecentQueries(3))
        self.lengths, self.starts, self.coming = [0] * SEQS, [SINK] * SEQS, [0] * SEQS

    @property
    def paused(self) -> frozenset[int]:
        return self.updater.sequences.paused

    def ring(self, seq: int) -> int:
        return REGIONS.indexed(self.starts[seq], self.lengths[seq])

    @property
    def ended(self) -> list[int]:
        """Paused sequences whose prompts have ended."""
        return [seq for seq in self.paused if self.lengths[seq] and not self.coming[seq]]

    def fed(self, seq: int) -> bool:
        """Whether a step decodes the sequence."""
        return seq not in self.paused and self.lengths[seq] > 0 and not self.coming[seq]

    @rule(seq=which, total=st.integers(1, 40), tokens=st.integers(1, 40), paused=st.booleans(), fails=oneof)
    def chunk(self, seq: int, total: int, tokens: int, paused: bool, fails: bool) -> None:
        """A chunk of the prompt that is coming, or of a new one. A sequence without tokens may be paused until resume()."""
        past = self.lengths[seq]
        if not self.coming[seq]:
            self.coming[seq] = min(total, LONGEST - past)
            self.updater.sequences.paused |= {seq} if paused and not past else set()
        tokens = min(tokens, self.coming[seq])
        if not tokens:
            return
        length, left, rows = past + tokens, self.coming[seq] - tokens, torch.zeros(1, tokens, 2, 1)
        passed = {seq: torch.zeros(1, length, 2, 1)} if past and not left and self.updater.takes_whole(seq) else {}
        try:
            self.store.append(seq, rows)
            self.updater.prompt(Row(seq, seq, 0, tokens, past), *rows.unbind(2), torch.zeros(1, min(3, tokens), 1), left)
            self.updater.begin({} if left else {seq: REGIONS.first_indexed(length)}, passed)
            if fails:
                raise BrokenError
        except BrokenError:
            self.failed(seq)
            return
        self.lengths[seq], self.starts[seq], self.coming[seq] = length, REGIONS.first_indexed(length), left
        with suppress(BrokenError):
            self.updater.commit()
            assert not any(own.before or isinstance(own.state, Waiting) for own in self.updater._of)

    def failed(self, *seqs: int) -> None:
        """A step failed that these sequences had a part in."""
        self.updater.drop()
        for seq in seqs:
            if self.lengths[seq]:
                self.updater.rollback(seq, self.ring(seq))
            else:
                self.updater.clear(seq)
            self.store.truncate(seq, self.lengths[seq])

    @precondition(lambda self: any(map(self.fed, range(SEQS))))
    @rule(tokens=st.integers(1, 12), fails=oneof, taken_back=oneof)
    def decode(self, tokens: int, fails: bool, taken_back: bool) -> None:
        fed = [seq for seq in range(SEQS) if self.fed(seq) and self.lengths[seq] + tokens <= LONGEST]
        before, rejoin = list(self.lengths), None
        try:
            self.renewed(fed)
            rejoin = self.updater.branch() if taken_back else None
            for t in range(tokens):
                self.renewed(fed)
                for seq in fed:
                    self.lengths[seq] += 1
                    self.store.append(seq, torch.zeros(1, 1, 2, 1))
                if fails and t == tokens - 1:
                    for seq in fed:
                        self.lengths[seq] -= 1
                    raise BrokenError
        except BrokenError:
            self.failed(*fed)
        if rejoin is not None:
            rejoin()
            self.lengths = before
            for seq in fed:
                self.store.truncate(seq, before[seq])

    def renewed(self, fed: Sequence[int]) -> None:
        """Do what comes before a step: afterwards the index has all that the step may select."""
        self.updater.renew({seq: self.ring(seq) for seq in fed})
        ends = {seq: self.ring(seq) + REGIONS.buffer * REGIONS.full(self.starts[seq], self.lengths[seq]) for seq in fed}
        leaving = [(seq, self.ring(seq), end, end) for seq, end in ends.items() if self.updater.indexed(seq) < end]
        if leaving:
            self.updater.flush(leaving, torch.zeros(len(leaving), 1, REGIONS.buffer, 2, 1))
        self.group.wait()
        assert not self.updater.stale & set(fed)
        assert {seq: self.group.index.ends[seq] for seq in fed} == {seq: self.updater.indexed(seq) for seq in fed}
        assert all(self.updater.indexed(seq) >= ends[seq] for seq in fed)

    @precondition(lambda self: self.ended)
    @rule(seq=which)
    def resume(self, seq: int) -> None:
        seq = self.ended[seq % len(self.ended)]
        self.updater.take_built(seq)
        self.updater.sequences.paused -= {seq}

    @precondition(lambda self: self.ended)
    @rule(seq=which, total=st.integers(1, 40))
    def another(self, seq: int, total: int) -> None:
        """A paused sequence gets another prompt."""
        seq = self.ended[seq % len(self.ended)]
        self.coming[seq] = min(total, LONGEST - self.lengths[seq])

    @precondition(lambda self: min(self.lengths) == 0)
    @rule(length=st.integers(1, 40), known=st.integers(0, 40), paused=st.booleans())
    def load(self, length: int, known: int, paused: bool) -> None:
        """A sequence comes with its rows and a state of the index, from a prefix cache."""
        seq, start, end = self.lengths.index(0), REGIONS.first_indexed(length), max(SINK, known)
        if self.coming[seq]:
            return
        self.updater.sequences.paused |= {seq} if paused else set()
        self.store.append(seq, torch.zeros(1, length, 2, 1))
        self.lengths[seq], self.starts[seq] = length, start
        try:
            self.updater.load(seq, start, IndexState(end, SINK, end) if known else None)
        except BrokenError:
            self.clear(seq)

    @rule(seq=which)
    def pause(self, seq: int) -> None:
        self.updater.sequences.paused |= {seq} if self.fed(seq) else set()

    @precondition(lambda self: min(self.lengths) > 0)
    @rule(seq=which)
    def clear(self, seq: int) -> None:
        self.updater.clear(seq)
        self.store.truncate(seq, 0)
        self.updater.sequences.paused -= {seq}
        self.lengths[seq], self.starts[seq], self.coming[seq] = 0, SINK, 0

    @precondition(lambda self: any(map(self.fed, range(SEQS))))
    @rule(seq=which, drop=st.integers(1, 40), exactly=st.booleans())
    def crop(self, seq: int, drop: int, exactly: bool) -> None:
        length = self.lengths[seq] - drop
        if length <= 0 or not self.fed(seq):
            return
        self.updater.retriever.recover()
        self.updater.rollback(seq, self.ring(seq))  # tokens that were about to leave the ring
        start = REGIONS.indexed(min(self.starts[seq], REGIONS.first_indexed(length)), length)
        if start < self.ring(seq):
            (self.updater.rollback if exactly else self.updater.truncate)(seq, start)
        self.store.truncate(seq, length)
        self.lengths[seq], self.starts[seq] = length, start

    @rule(seq=which)
    def lose(self, seq: int) -> None:
        self.updater.retriever.recover()
        if self.fed(seq) and self.ring(seq) > SINK:
            self.updater.begin_again(seq)

    @rule(order=st.permutations(range(SEQS)))
    def reorder(self, order: list[int]) -> None:
        self.updater.retriever.recover()
        self.updater.reorder(order)
        self.store.reorder(order)
        self.updater.sequences.paused = frozenset(new for new, old in enumerate(order) if old in self.paused)
        for counts in (self.lengths, self.starts, self.coming):
            counts[:] = [counts[seq] for seq in order]

    @precondition(lambda self: any(self.lengths))
    @rule()
    def break_next(self) -> None:
        """The next call of the index fails."""
        self.group.index.breaks = True

    @rule()
    def wait(self) -> None:
        self.updater.retriever.recover()

    @invariant()
    def the_index_has_what_the_watermarks_say(self) -> None:
        for own in self.updater._of if hasattr(self, "updater") else ():
            assert own.first <= own.upto <= max(SINK, self.lengths[own.seq])
            assert not isinstance(own.state, SideIndex) or own.seq in self.paused
            if own.state == Stale() or self.group.jobs or self.group.error:
                continue
            if isinstance(own.state, Ready):
                assert self.group.index.ends[own.seq] == own.upto


Updates.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestUpdates = Updates.TestCase
