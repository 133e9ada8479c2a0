"""The common base of PRKV's two indexes: pages, and static tokens that the latest queries choose repeatedly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor

from kvthaw.cache.index_api import IndexContext
from kvthaw.errors import at_least
from kvthaw.index.bounds import BoundIndex
from kvthaw.index.tables import Column, Held
from kvthaw.kernels.page_bounds import Spread
from kvthaw.kernels.unit_scores import RecentQueries
from kvthaw.kernels.unit_select import Policy


@dataclass(slots=True)
class Turn:
    """Of a sequence: tokens since its static set was chosen, and the layer's early ones in the first interval; the same before the
    last append; for how many rows the set was; how many queries of its prompt were recorded."""

    since: int = 0
    before: int = 0
    rows: int | None = None
    recorded: int = 0


class ObservedIndex(BoundIndex):
    """Pages, and a window of the latest queries of select(), [B, Hq, W, D], which captured steps record too.

    Every `interval` tokens a subclass chooses the static set again, by these queries. Layers take turns: the first interval
    of each layer is shorter by `early` tokens. These are spread evenly, so that the fewest possible layers refresh in one
    append.
    """

    traits = replace(BoundIndex.traits, grows=False, remembers=True)
    mapped = True
    queries = Column()
    seen = Column()

    def __init__(
        self, context: IndexContext, *, page: int, spread: Spread, policy: Policy, share: float, interval: int, window: int
    ) -> None:
        at_least(1, interval=interval)
        super().__init__(context, page=page, spread=spread, policy=policy)
        self.share, self.interval = share, interval
        self.early = int(interval * _spread(context.layer))
        self.rows = context.rows  # 0 until select() is first asked
        self.window = max(1, min(context.regions.window, window))
        self.tables.add("queries", (context.q_heads, self.window, context.head_dim), context.dtype)
        self.tables.add("seen", (self.window,), torch.float32)
        self.steps = torch.zeros(1, dtype=torch.int64, device=context.device)
        self.turns = self.tables.host(partial(Turn, since=self.early))  # without a reference to the index

    def recent_queries(self, seqs: int) -> RecentQueries:
        """See UnitIndex: the observation window."""
        return RecentQueries(self.queries[:seqs], self.seen[:seqs], self.steps)

    # Index

    def append(self, seqs: Sequence[int], keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        super().append(seqs, keys, values, queries)
        for i, seq in enumerate(seqs):
            turn = self.turns[seq]
            turn.before = turn.since
            if queries is not None:
                self.record_queries(seq, queries[i])
            turn.since += keys.shape[2]

    def truncate(self, seq: int, length: int) -> None:
        if seq < len(self.turns) and length <= self.first:
            self.turns[seq] = Turn(since=self.early)
            self.seen[seq].zero_()
            self.queries[seq].zero_()
        super().truncate(seq, length)

    def undo(self, seq: int, length: int) -> None:
        self.turns[seq].since = self.turns[seq].before
        super().undo(seq, length)

    def unask(self) -> None:
        """See Index: the next query takes the place of the last one."""
        self.steps.sub_(1)

    def export(self, seq: int) -> Held:
        """Return the window from the oldest query on, because the step count continues meanwhile; see Tables."""
        (rows, items), order = super().export(seq), self._oldest_first()
        rows["queries"] = self.queries[seq].index_select(1, order).cpu()
        rows["seen"] = self.seen[seq].index_select(0, order).cpu()
        return rows, items

    def load(self, seq: int, held: Held, end: int) -> None:
        super().load(seq, held, end)
        order, queries, seen = self._oldest_first(), self.queries[seq], self.seen[seq]
        queries.index_copy_(1, order, queries.clone())
        seen.index_copy_(0, order, seen.clone())

    def _oldest_first(self) -> Tensor:
        """Return the places of the window's queries, from the oldest on."""
        return (self.steps + torch.arange(self.window, device=self.steps.device)) % self.window

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), self.steps]

    def clone_from(self, other: Self) -> None:
        super().clone_from(other)
        self.steps, self.rows = other.steps.clone(), other.rows

    # The static set

    def begin(self, seq: int, first: int, queries: Tensor) -> None:
        """Empty a sequence and take the last queries [Hq, W, D] of its prompt."""
        self.clear(seq, first)
        self.record_queries(seq, queries)

    def record_queries(self, seq: int, queries: Tensor) -> None:
        """Queries [Hq, W, D] become the last that the window saw."""
        recent = queries[:, -self.window :]
        width = recent.shape[1]
        slots = (self.steps + torch.arange(-width, 0, device=self.steps.device)) % self.window
        self.queries[seq].index_copy_(1, slots, recent.to(self.queries.dtype))
        self.seen[seq].index_fill_(0, slots, 1.0)
        self.turns[seq].recorded = width

    def windows(self, seqs: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Copies of the windows' queries [R, H, G W, D] of some sequences and their weights [R, G W], which sum to 1."""
        which = self._deferred.numbers([(seq,) for seq in seqs], self.seen.device)[:, 0]
        queries = self.queries.index_select(0, which).unflatten(1, (self.context.kv_heads, -1)).flatten(2, 3)
        seen = self.seen.index_select(0, which)
        return queries, (seen / (seen.sum(dim=1, keepdim=True) * self.context.group).clamp(min=1)).repeat(1, self.context.group)

    def stored(self, seq: int, tokens: int) -> bool:
        """Return whether the store has a sequence's first `tokens` tokens behind the sink."""
        store = self.context.store
        return seq < store.seqs and store.length(seq) >= self.first + tokens


def _spread(n: int) -> float:
    """Return n's bits in reverse behind the point, in [0, 1): consecutive numbers fall evenly into halves, quarters and so on."""
    return int(f"{n:b}"[::-1], 2) / (1 << n.bit_length())
