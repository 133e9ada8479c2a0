"""prkv-plus: static tokens among pages of the text, chosen again from the keys of the best pages alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from kvthaw.cache.index_api import IndexContext, Selection
from kvthaw.errors import ConfigError, at_least
from kvthaw.index.observed import ObservedIndex
from kvthaw.index.units import Before
from kvthaw.kernels.observe import observe
from kvthaw.kernels.page_bounds import Spread
from kvthaw.kernels.rerank import TILE
from kvthaw.kernels.topk import run_length, topk
from kvthaw.kernels.unit_select import Policy, unit_select
from kvthaw_baselines.kernels.static_first import Pieces, numbers, static_first
from kvthaw_baselines.kernels.stored_scores import stored_scores

_QUERIES = 64  # of a KV head in the observation window, at most
_FIELD = 1024  # rows whose keys a refresh reads, at least


class StaticPageIndex(ObservedIndex, tested=True):
    """Static tokens first, then pages of the other tokens, each ranked by the bounds of all of its keys.

    A prompt's static tokens are chosen from all of its keys. Every `interval` tokens they are chosen again, within an
    append, in two passes. First the queries rank the pages by their bounds, by the mean of the softmax weights. Then the
    keys of the best pages' rows and of the present static tokens, up to the field of view, are read on the host. The tokens
    with the most mass among them become static.

    The field of view is four times the number of static tokens, and at least 1,024 rows. A refresh thus reads 2 D bytes per
    row of a few thousand rows per head, however long the sequence. Pages and bounds do not change. Only the order of the
    tokens is rewritten, which undo() restores. No token of the last page is static, so that the page stays in place and can
    be filled or cut.

    share: the static part of the rows that select() may return.
    observe: how many of the last queries choose the static tokens. At most the window's tokens, and enough for 64 queries
        per KV head.
    """

    def __init__(
        self,
        context: IndexContext,
        *,
        page: int = 16,
        spread: Spread = "mean",
        share: float = 0.25,
        interval: int = 128,
        policy: Policy = "max",
        observe: int = 8,
    ) -> None:
        if not (isinstance(share, int | float) and 0 <= share <= 1):
            raise ConfigError(f"share is {share!r}; it must be between 0 and 1")
        at_least(1, observe=observe)
        window = min(observe, max(1, _QUERIES // context.group))
        super().__init__(context, page=page, spread=spread, policy=policy, share=share, interval=interval, window=window)

    # Index

    def build(self, seq: int, first: int, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        self.begin(seq, first, queries)
        super().append([seq], keys[None], values[None], None)
        self.join()
        self.turns[seq].since = self.early
        if self.rows:
            tokens, _, _ = self._closed(seq)
            count = self._count(tokens)
            asked, weights = self.windows([seq])
            mass = observe(asked[0], keys[:, :tokens], weights.expand(len(keys), -1), scale=self.context.scale)
            top = torch.topk(mass, count, dim=1).indices.int() + first
            self._place([seq], top[None])

    def append(self, seqs: Sequence[int], keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        super().append(seqs, keys, values, queries)
        if due := [seq for seq in seqs if self._due(seq, 0) and self.stored(seq, self.seqs[seq].tokens)]:
            self.join()
            self._choose(due)

    def select(self, query: Tensor, budget: int) -> Selection:
        """See Index. A change of budget makes every sequence's static set again."""
        batch = query.shape[0]
        self.reserve(batch)
        self.rows = budget
        filled = [seq for seq in range(batch) if self.seqs[seq].tokens and self.stored(seq, self.seqs[seq].tokens)]
        stale = [seq for seq in filled if self.turns[seq].rows != budget]
        self.join()
        for seq in stale:
            if not self.turns[seq].recorded:  # no prompt was long enough to be built
                self.record_queries(seq, query[seq, :, None])
        self._choose(stale)
        return super().select(query, budget)

    def make_room(self, seqs: int, tokens: int) -> None:
        """See Index. Compiles the kernels of a refresh before there are tokens: no step should wait for that."""
        super().make_room(seqs, tokens)
        if tokens and self.rows and self.context.device.type == "cuda" and not any(host.tokens for host in self.seqs):
            self._heaviest(range(seqs), int(self.share * self.rows + 1e-6))

    # Inside

    def _saved(self, seq: int, n: int) -> Before:
        """See UnitIndex: the order too, where this append is to write it again."""
        before = super()._saved(seq, n)
        if not self._due(seq, n):
            return before
        host = self.seqs[seq]
        order, stops = self.order[seq, :, : host.tokens].clone(), self.stops[seq, :, : host.units + 1].clone()
        return replace(before, parts=(*before.parts, ("order", 0, order), ("stops", 0, stops)))

    def _due(self, seq: int, n: int) -> bool:
        """Return whether a sequence's static tokens are chosen again once it has n tokens more."""
        turn = self.turns[seq]
        return turn.rows is not None and turn.since + n >= self.interval

    def _closed(self, seq: int) -> tuple[int, int, Pieces]:
        """Return the number of a sequence's tokens before the last page, the number of these pages, and where full pages
        begin."""
        host = self.seqs[seq]
        pieces = [(0, 0)]
        for token, page in host.marks:
            if token - pieces[-1][0] != (page - pieces[-1][1]) * self.size:
                pieces.append((token, page))
        return host.tokens - host.kept, host.units - (host.kept > 0), tuple(pieces)

    def _count(self, tokens: int) -> int:
        """Return how many of `tokens` tokens become static."""
        return min(tokens, int(self.share * self.rows + 1e-6))

    def _choose(self, seqs: Sequence[int]) -> None:
        """Choose the static tokens of sequences again, for adjacent sequences with equal numbers at once."""
        counts = [self._count(self._closed(seq)[0]) for seq in seqs]
        alike = groupby(enumerate(zip(seqs, counts, strict=True)), lambda each: (each[1][0] - each[0], each[1][1]))
        for (_, count), some in alike:
            own = [seq for _, (seq, _) in some]
            self._place(own, self._heaviest(own, count))

    def _heaviest(self, seqs: Sequence[int], count: int) -> Tensor:
        """Return the positions [R, H, count] int32 to which the window's queries of neighbouring sequences attend most."""
        context, store, device = self.context, self.context.store, self.context.device
        of, heads = slice(seqs[0], seqs[-1] + 1), context.kv_heads
        if not count:
            return torch.empty((len(seqs), heads, 0), dtype=torch.int32, device=device)
        field = -(-max(_FIELD, 4 * count) // TILE) * TILE
        closed = [self._closed(seq)[:2] for seq in seqs]
        limits = [tuple(min(tokens, field) for tokens, _ in closed), tuple(pages for _, pages in closed)]
        rows, pages = self._deferred.numbers(limits, device)
        units = self.digests.shape[2] if device.type == "cuda" else max(pages for _, pages in closed)
        asked = self.queries[of].flatten(1, 2)
        found, _ = unit_select(
            asked, self.digests[of, :, :units], self.stops[of, :, : units + 1], self.order[of], pages,
            first=self.first, budget=field, scale=context.scale, policy="mean",
        )  # fmt: skip
        if device.type == "cuda":
            store.order(device)
        table = store.table.on(device) if device.type == "cuda" else store.table.on_cpu()
        how: dict[str, Any] = {"scale": context.scale, "run": run_length(field, count) or TILE, "format": store.format}
        true = stored_scores(asked, table[of], store.block_size, found, rows, **how)
        return topk(true, found, rows, count, 0, context.scale, "mean")[0]

    def _place(self, seqs: Sequence[int], static: Tensor) -> None:
        """Make positions [R, H, C] the static tokens of adjacent sequences, on the current stream and so between two steps."""
        of, spans = slice(seqs[0], seqs[-1] + 1), [self._closed(seq) for seq in seqs]
        where = self._deferred.numbers(numbers(spans), self.context.device)
        chosen = static.sort(dim=2).values
        static_first(chosen, self.order[of], self.stops[of], spans, where, size=self.size, first=self.first)
        for seq in seqs:
            turn = self.turns[seq]
            turn.since, turn.rows = (0 if turn.since >= self.interval else turn.since), self.rows
