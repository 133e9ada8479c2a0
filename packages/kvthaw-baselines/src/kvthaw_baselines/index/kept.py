"""Choices that outlive their step: SnapKV and H2O keep some tokens and do not look at the others again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self, get_args

import torch
from torch import Tensor

from kvthaw.cache.index_api import Index, IndexContext, Selection, Traits
from kvthaw.errors import one_of
from kvthaw.index.tables import TablesOnDevice

Agree = Literal["mean", "max"]
"""How the query heads of a group agree on a token: the mean or the largest of the attention that each pays to it."""
_SCORES = 1 << 24  # float32 scores held at once


def observed(queries: Tensor, keys: Tensor, *, scale: float, agree: Agree) -> Tensor:
    """Return the attention of the last W of T tokens to each token: queries [H, G, W, D], keys [H, T, D], W <= T -> [H, T]
    float32.

    Query w is at T - W + w and sees the keys up to its own. The softmax weights are summed over the queries, and combined
    over the G query heads.
    """
    heads, group, width, _ = queries.shape
    tokens = keys.shape[1]
    place = torch.arange(tokens, device=keys.device)
    total = torch.zeros((heads, group, tokens), device=keys.device)
    keys, step = keys.float().transpose(1, 2), max(1, _SCORES // (heads * group * tokens))
    for at in range(0, width, step):
        some = queries[:, :, at : at + step]
        scores = (some.float().flatten(1, 2) @ keys).view(heads, group, -1, tokens) * scale
        stands = tokens - width + at + torch.arange(some.shape[2], device=keys.device)
        total += torch.softmax(scores.masked_fill(place > stands[:, None], -torch.inf), dim=3).sum(dim=2)
    return total.mean(dim=1) if agree == "mean" else total.amax(dim=1)


class KeptIndex(TablesOnDevice, Index):
    """Keep at most the rows that select() may return, each with a score. Of new rows, the best are kept.

    A row that is not kept is never selected again, although the store has it. Exception: a dense pass that gives the
    sequence more tokens is a prompt, and chooses again from all rows. Before the number of rows is known (from the layer's
    shape, or the first select()) everything is kept.

    kept: [B, H, M] int32, positions, -1 padded.
    scores: [B, H, M] float32.
    keys: [B, H, M, D] if with_keys.
    """

    traits = Traits(graph_safe=True, grows=False, evicts=True)

    def __init__(self, context: IndexContext, *, agree: Agree, with_keys: bool = False) -> None:
        one_of(get_args(Agree), agree=agree)
        super().__init__(context)
        self.agree, self.rows = agree, context.rows
        size = context.kv_heads, "rows"
        self.tables.add("kept", size, torch.int32, -1)
        self.tables.add("scores", size, torch.float32)
        if with_keys:
            self.tables.add("keys", (*size, context.head_dim), context.dtype)
        self.tables.reserve(0, rows=context.rows)
        self.tokens = self.tables.host(int)  # that a sequence was given

    # What a method adds

    def observe(self, seq: int, queries: Tensor, keys: Tensor, tokens: int) -> Tensor:
        """Return the scores of a prompt's first `tokens` tokens after the sink, [H, tokens] float32.

        keys: [H, T, D], of these tokens and of the tokens after them in the window.
        queries: [H, G, W, D], of the last W of the T tokens.
        """
        raise NotImplementedError

    def arrive(self, seq: int, start: int, stop: int) -> Tensor:
        """The scores of the tokens start .. stop, which leave the ring, [H, stop - start] float32."""
        raise NotImplementedError

    def rank(self, seq: int, rows: Tensor, scores: Tensor) -> Tensor:
        """What decides who stays, [H, N]; of rows [H, N] and their scores."""
        return scores

    # Index

    def build(self, seq: int, first: int, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        """See Index. Without tokens behind these in the store it is no prompt: the first that leave the ring."""
        self.clear(seq, first)
        self._take(seq, keys, queries)

    def append(self, seqs: Sequence[int], keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        """See Index. With queries it is a dense pass."""
        self.tables.reserve(max(seqs) + 1)
        for i, seq in enumerate(seqs):
            self._take(seq, keys[i], None if queries is None else queries[i])

    def select(self, query: Tensor, budget: int) -> Selection:
        batch = query.shape[0]
        self.tables.reserve(batch)
        if budget != self.tables.room["rows"]:
            self.resize(budget)
        rows = self.tables["kept"][:batch].clone()
        return Selection(rows, (rows >= 0).sum(dim=2, dtype=torch.int32))

    def truncate(self, seq: int, length: int) -> None:
        if seq < len(self.tokens):
            self.tokens[seq] = min(self.tokens[seq], max(0, length - self.first))
            own = self._own(seq)
            self._fill(seq, own | {"kept": own["kept"].masked_fill(own["kept"] >= length, -1)})

    def clone_from(self, other: Self) -> None:
        super().clone_from(other)
        self.rows = other.rows

    # Inside

    def resize(self, rows: int) -> None:
        """Keep the best `rows` rows from now on."""
        seqs = [self._own(seq) for seq in range(len(self.tokens))]
        self.rows = rows
        self.tables.resize("rows", rows)
        for seq, own in enumerate(seqs):
            self._fill(seq, own)

    def choose_again(self, seq: int, queries: Tensor, behind: Tensor) -> None:
        """Choose from all tokens that the sequence was given. queries [Hq, W, D]; behind [H, n, D]: keys of the tokens after
        them."""
        start, stop = self.first, self.first + self.tokens[seq]
        keys = torch.cat((self.context.store.read_keys(seq, start, stop, self.context.device), behind), dim=1)
        watching = queries[:, -keys.shape[1] :].unflatten(0, (self.context.kv_heads, -1))
        scores = self.observe(seq, watching, keys, stop - start)
        self._fill(seq, self._new(start, stop, scores, keys))

    def _take(self, seq: int, keys: Tensor, queries: Tensor | None) -> None:
        """The next tokens of a sequence, keys [H, n, D]."""
        start = self.first + self.tokens[seq]
        stop = start + keys.shape[1]
        self.tokens[seq] += keys.shape[1]
        end = self.context.store.length(seq) if seq < self.context.store.seqs else 0
        if queries is not None and end > stop:
            self.choose_again(seq, queries, self.context.store.read_keys(seq, stop, end, self.context.device))
            return
        new = self._new(start, stop, self.arrive(seq, start, stop), keys)
        self._fill(seq, {name: torch.cat((table, new[name]), dim=1) for name, table in self._own(seq).items()})

    def _new(self, start: int, stop: int, scores: Tensor, keys: Tensor) -> dict[str, Tensor]:
        rows = torch.arange(start, stop, dtype=torch.int32, device=keys.device).expand(keys.shape[0], -1)
        return {"kept": rows, "scores": scores, "keys": keys[:, : stop - start]}

    def _own(self, seq: int) -> dict[str, Tensor]:
        return {name: self.tables[name][seq] for name in ("kept", "scores", "keys") if name in self.tables}

    def _fill(self, seq: int, some: dict[str, Tensor]) -> None:
        """Keep the best of some rows. Missing rows (-1) rank last, and earlier rows rank before equal ones."""
        rows = some["kept"]
        if not self.rows:
            self.tables.reserve(0, rows=rows.shape[1])
        rank = self.rank(seq, rows, some["scores"]).masked_fill(rows < 0, -torch.inf)
        limit = self.tables.room["rows"]
        order = torch.sort(rank, dim=1, descending=True, stable=True).indices[:, :limit]
        n = order.shape[1]
        for name in self._own(seq):
            index = order if name != "keys" else order[..., None].expand(-1, -1, self.context.head_dim)
            self.tables[name][seq, :, :n] = some[name].gather(1, index)
        self.tables["kept"][seq, :, n:] = -1
