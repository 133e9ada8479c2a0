"""PRKV: a static set of single tokens, chosen by an observation window, before pages of all the others."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, Literal, Self

import torch
from torch import Tensor

from kvthaw.cache.index_api import IndexContext, Selection
from kvthaw.cache.ranks import ALONE, Ranks
from kvthaw.errors import ConfigError
from kvthaw.index.observed import ObservedIndex
from kvthaw.index.reordering import PendingReordering, Reordering, reordered, spans
from kvthaw.index.tables import Held
from kvthaw.index.units import Seq, UnitIndex
from kvthaw.kernels.kmeans import whole
from kvthaw.kernels.page_bounds import Spread
from kvthaw.kernels.unit_select import Policy

_KEYS = 1 << 28
"""Bytes of keys from which static sets are chosen at once."""
_PIECE = 1 << 24
"""Bytes of keys that are read at once."""
_WINDOW_QUERIES = 128  # queries of the observation window, at most
_UNKNOWN = 0.25  # the automatic share as long as it cannot be chosen: the paper's


@dataclass(slots=True)
class Static:
    """State of a sequence: the static share of its rows, and the reordering that the next append publishes."""

    share: float | None = None
    pending: PendingReordering | None = None

    def to(self, device: torch.device) -> Static:
        """Return a copy with the reordering on a device."""
        return replace(self, pending=self.pending and self.pending.to(device))


def overlap_share(queries: Tensor, keys: Tensor, rows: int, page: int, ranks: Ranks = ALONE) -> float:
    """PRKV's appendix G: S = page floor(E_h[C_h] / page) / rows, C_h the overlap of the top `rows` keys of two queries of head
    h. queries [Hq, 2, D]: the first and the last of the observation window; keys [H, T, D].

    ranks: the processes that have the other heads. Syncs the host.
    """
    heads, tokens = keys.shape[:2]
    k = min(rows, tokens)
    scores = queries.unflatten(0, (heads, -1)).flatten(1, 2).float() @ keys.float().transpose(1, 2)
    best = torch.topk(scores, k, dim=2).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(2, best, True).unflatten(1, (-1, 2))
    common = float(ranks.gather(chosen.all(dim=2).sum(dim=2), 0).float().mean())
    return page * int(common / page) / rows


class HybridIndex(ObservedIndex, tested=True):
    """Static tokens first, then pages of the rest, ranked by their bounds (PRKV, section 4).

    share: the static part of the rows that select() may return. "auto" chooses it at the prompt, or at the first refresh
        with more tokens than rows; until then it is 0.25.

    Every `interval` tokens the latest queries choose the static set again, and pages and digests are rebuilt around it.
    Only the map of this index changes; no row moves. The work starts in one append and is published atomically before the
    next, after the last step between them. It reads all keys from the host, 16 MB at a time, in equal parts with each step
    between. On a GPU it runs on the cache's side stream, concurrently with the model.

    A sequence that was built before the number of rows was known starts with pages only. The first select() then chooses
    its static set, from the keys in the store.
    """

    shuffled = True

    def __init__(
        self,
        context: IndexContext,
        *,
        page: int = 32,
        spread: Spread = "mean",
        share: float | Literal["auto"] = 0.25,
        interval: int = 128,
        policy: Policy = "max",
    ) -> None:
        if share != "auto" and not (isinstance(share, int | float) and 0 <= share <= 1):
            raise ConfigError(f"share is {share!r}; it must be 'auto' or between 0 and 1")
        self.auto = share == "auto"
        known = _UNKNOWN if share == "auto" else float(share)
        super().__init__(
            context, page=page, spread=spread, policy=policy, share=known, interval=interval, window=_WINDOW_QUERIES
        )
        self.statics = self.tables.host(Static)

    @property
    def reversible(self) -> bool:
        """Whether undo() is exact: not if the next append publishes a reordering; see Index."""
        return all(static.pending is None for static in self.statics)

    # Index

    def build(self, seq: int, first: int, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        self.begin(seq, first, queries)
        UnitIndex.append(self, [seq], keys[None], values[None], None)
        if self.rows and keys.shape[1]:
            self._place({seq: self.reorderings([seq], keys[None], *self.window_queries([seq]))[0]})

    def take_effect(self, seqs: Sequence[int]) -> None:
        self.reserve(max(seqs) + 1)
        self._place({seq: pending.take() for seq in seqs if (pending := self.statics[seq].pending) is not None})

    def append(self, seqs: Sequence[int], keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        self.take_effect(seqs)
        super().append(seqs, keys, values, queries)
        self._refresh(seqs, keys)

    def select(self, query: Tensor, budget: int) -> Selection:
        """See Index. A change of budget makes every sequence's static set again."""
        batch = query.shape[0]
        self.reserve(batch)
        self.rows = budget
        for seq in range(batch):
            host, turn = self.seqs[seq], self.turns[seq]
            if host.tokens and turn.rows != budget and self.stored(seq, host.tokens):
                if not turn.recorded:  # no prompt was long enough to be built
                    self.record_queries(seq, query[seq, :, None])
                self._drop(seq)
                self._place({seq: self.reorderings([seq], self.read(seq, host.tokens), *self.window_queries([seq]))[0]})
        return super().select(query, budget)

    def truncate(self, seq: int, length: int) -> None:
        """See Index. A reordering that has not been put in place is dropped, and made again with the next append."""
        if seq < len(self.statics):
            if self._drop(seq):
                self.turns[seq].since = self.interval
            if length <= self.first:
                self.statics[seq] = Static()
        super().truncate(seq, length)

    def undo(self, seq: int, length: int) -> None:
        """See Tables. A reordering that the append began is dropped."""
        self._drop(seq)
        super().undo(seq, length)

    def reorder(self, seqs: Sequence[int]) -> None:
        for static in self.statics:
            if static.pending is not None:
                static.pending.take()  # while the sequences have the numbers that its work knows
        super().reorder(seqs)

    def clone_from(self, other: Self) -> None:
        super().clone_from(other)
        self.statics[:] = [static.to(self.steps.device) for static in self.statics]

    def export(self, seq: int) -> Held:
        """See Tables: with the reordering that the next append would put in place."""
        rows, (*items, static) = super().export(seq)
        return rows, [*items, static.to(torch.device("cpu"))]

    def load(self, seq: int, held: Held, end: int) -> None:
        super().load(seq, held, end)
        self.statics[seq] = self.statics[seq].to(self.steps.device)

    # The static set

    def window_queries(self, seqs: Sequence[int]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return copies of what `reorderings` needs of the sequences' windows: queries, weights, and the first sequence's ends.

        The ends are its first and last query, [Hq, 2, D]. They are None unless they choose its share and differ.
        """
        ends, static = None, self.statics[seqs[0]]
        if self.auto and static.share is None and (recorded := int(self.seen[seqs[0]].sum())) > 1:
            back = torch.tensor([-recorded, -1], device=self.steps.device)
            ends = self.queries[seqs[0]].index_select(1, (self.steps + back) % self.window)
        return *self.windows(seqs), ends

    def reorderings(
        self, seqs: Sequence[int], keys: Tensor, queries: Tensor, weights: Tensor, ends: Tensor | None = None
    ) -> list[Reordering]:
        """Choose static sets of one size by the windows' queries, from keys [R, H, T, D], and the pages of the other tokens."""
        return whole(self._pieces(seqs, lambda: keys, (queries, weights, ends)))

    def _pieces(
        self, seqs: Sequence[int], keys: Callable[[], Tensor], windows: tuple[Tensor, Tensor, Tensor | None]
    ) -> Generator[None, None, list[Reordering]]:
        """Make reorderings() in pieces; see `reordered`. keys() is called with the first piece."""
        (queries, weights, ends), held = windows, keys()
        how: dict[str, Any] = {"scale": self.context.scale, "first": self.first, "page": self.size, "spread": self.spread}
        return (yield from reordered(held, queries, weights, count=self._count(seqs[0], held[0], ends), **how))

    def _count(self, seq: int, keys: Tensor, ends: Tensor | None) -> int:
        """Return the size of a sequence's static set, keys [H, T, D].

        The automatic share stays unknown with a single query, or with no more keys than rows: any two queries then choose
        all of them.
        """
        static = self.statics[seq]
        if static.share is None and not self.auto:
            static.share = self.share
        elif static.share is None and ends is not None and keys.shape[1] > self.rows:
            static.share = overlap_share(ends, keys, self.rows, self.size, self.context.ranks)
        share = self.share if static.share is None else static.share
        return min(keys.shape[1], int(share * self.rows + 1e-6))

    def _refresh(self, seqs: Sequence[int], new: Tensor) -> None:
        """Start the reorderings that the next append will publish, for sequences whose interval is over.

        Sequences with equal lengths are reordered together, up to _KEYS bytes of keys.

        new: [R, H, n, D], the keys of this append.
        """
        n, row = new.shape[2], new[0, :, 0].nbytes
        alike: dict[tuple[int, object], list[tuple[int, Tensor]]] = {}
        for seq, own in zip(seqs, new.unbind(), strict=True):
            host, turn, static = self.seqs[seq], self.turns[seq], self.statics[seq]
            if turn.since >= self.interval and turn.rows is not None and self.stored(seq, host.tokens - n):
                turn.since = 0
                share = (seq,) if static.share is None else static.share  # which its keys distinguish
                alike.setdefault((host.tokens, share), []).append((seq, own))
        for (tokens, _), some in alike.items():
            most = max(1, _KEYS // (tokens * row))
            for at in range(0, len(some), most):
                self._begin(*zip(*some[at : at + most], strict=True))

    def _begin(self, seqs: tuple[int, ...], new: tuple[Tensor, ...]) -> None:
        """Start the reorderings of sequences with equal numbers of tokens.

        new: the last tokens of each, [H, n, D].
        """
        last, windows = torch.stack(new), self.window_queries(seqs)
        old, most = self.seqs[seqs[0]].tokens - last.shape[2], max(1, _PIECE // last[0, :, 0].nbytes)
        keys: list[Tensor] = []
        made: dict[int, Reordering] = {}

        def held() -> Tensor:
            if not keys:
                keys.append(self._keys(len(seqs), old + last.shape[2]))
                keys[0][:, :, old:] = last
            return keys[0]

        def read(own: slice, at: int) -> None:
            there = [i for i in range(len(seqs))[own] if self.stored(seqs[i], old)]  # the reorderings of others are obsolete
            whole = len(there) == len(seqs[own])
            for some in [own] if whole else [slice(i, i + 1) for i in there]:
                self._read(seqs[some], at, held()[some, :, at : min(at + most, old)])

        pieces = self._pieces(seqs, held, windows)

        def advance(*, last: bool = False) -> None:
            nonlocal pieces
            try:
                if not last:
                    next(pieces)
                    return
                made.update(zip(seqs, whole(pieces), strict=True))
                keys.clear()
            except BaseException:  # the next job begins again
                pieces = self._pieces(seqs, held, windows)
                raise

        at_once = max(1, most // max(1, old))  # sequences
        owns = [slice(i, i + at_once) for i in range(0, len(seqs), at_once)]
        reads = [partial(read, own, at) for own in owns for at in range(0, old, most)]
        used = last, *(x for x in windows if x is not None)
        steps = self.context.regions.buffer  # until the next append
        parts = len(spans(self.context.kv_heads, old + last.shape[2], last[0, 0, 0].nbytes))
        jobs: list[Callable[[], None]] = [advance] * (3 * parts if parts > 1 else 0)
        work = self._side.spread(last.device, [*reads, *jobs, partial(advance, last=True)], steps, *used)
        for seq in seqs:
            self.statics[seq].pending = PendingReordering(seq, made, self._side, work)

    def _drop(self, seq: int) -> bool:
        """Drop a pending reordering. The host waits until the device has stopped reading the store. Returns whether there was
        one."""
        pending, self.statics[seq].pending = self.statics[seq].pending, None
        if pending is None:
            return False
        others = [static for static in self.statics if static.pending is not None and static.pending.work is pending.work]
        if others:
            self._side.finish(pending.work)
        self._side.cancel(pending.work)
        return True

    def _place(self, ready: dict[int, Reordering]) -> None:
        """Put reorderings in place, of sequences of equal size that are neighbours at once. Between two steps: on their stream."""
        self.join()
        for reordering in ready.values():
            reordering.wait()
        sizes = {seq: (one.order.shape[1], one.static) for seq, one in ready.items()}
        for _, some in groupby(enumerate(sorted(ready)), lambda each: (each[1] - each[0], sizes[each[1]])):
            seqs = [seq for _, seq in some]
            self._place_alike(seqs, [ready[seq] for seq in seqs])

    def _place_alike(self, seqs: list[int], ready: list[Reordering]) -> None:
        """Put reorderings of equal sizes in the places of neighbouring sequences."""
        tables = zip(*(one.tensors() for one in ready), strict=True)
        order, digests, stops, tail = (own[0][None] if len(own) == 1 else torch.stack(own) for own in tables)
        tokens, units, kept, of = order.shape[2], digests.shape[2], tail.shape[2], slice(seqs[0], seqs[-1] + 1)
        self.reserve(max(seqs) + 1, units + 1, tokens)
        self.order[of, :, :tokens] = order
        self.digests[of, :, :units] = digests
        self.stops[of, :, : units + 1] = stops
        self.recent[of].index_copy_(2, self._ring(tokens - kept, kept), tail)
        self.counts[of] = units
        for seq in seqs:
            last_page = (tokens - kept, units - (kept > 0))
            marks = [(0, 0)] if last_page == (0, 0) else [(0, 0), last_page]
            self.seqs[seq] = Seq(tokens, units, kept, marks)
            self.turns[seq].rows, self.statics[seq].pending = self.rows, None
            self._before.pop(seq, None)

    def _keys(self, seqs: int, tokens: int) -> Tensor:
        context = self.context
        size = seqs, context.kv_heads, tokens, context.head_dim
        return torch.empty(size, dtype=context.dtype, device=context.device)

    def read(self, seq: int, tokens: int) -> Tensor:
        """Return the keys [1, H, T, D] of the first `tokens` tokens behind a sequence's sink, from the store."""
        keys = self._keys(1, tokens)
        self._read([seq], 0, keys)
        return keys

    def _read(self, seqs: Sequence[int], at: int, out: Tensor) -> None:
        """Copy the keys of sequences from token `at` on to out [R, H, n, D]."""
        self.context.store.copy_keys(seqs, self.first + at, out)
