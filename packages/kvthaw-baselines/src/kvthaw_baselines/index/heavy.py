"""H2O's choice: recent tokens, and heavy hitters by accumulated softmax weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from kvthaw.cache.index_api import IndexContext, Selection
from kvthaw.cache.step import Step
from kvthaw.errors import one_of
from kvthaw.index.tables import Held
from kvthaw.kernels.gpu import capturing
from kvthaw.kernels.places import held, newest_place, place_of
from kvthaw_baselines.index.kept import Agree, KeptIndex, observed

Score = Literal["sum", "mean"]
"""What of the weights that a token was paid ranks it: their sum, or their mean over the queries that could see it."""


class HeavyIndex(KeptIndex, tested=True):
    """H2O: half of the budget holds the most recent tokens, half the tokens that were attended to most over all steps so far.

    Each step's softmax over sink, ring and kept tokens adds to their scores as soon as its own key is in the ring: with the
    next step, or before tokens leave. A prompt's scores begin with the attention of its last `queries` queries, or of all
    that are known. What a token paid before a crop dropped it stays paid. Sink and ring count as recent. The rest of that
    half of the budget goes to the latest of the kept tokens.
    """

    traits = replace(KeptIndex.traits, remembers=True)

    def __init__(
        self, context: IndexContext, *, agree: Agree = "mean", score: Score = "sum", queries: int | None = None
    ) -> None:
        one_of(get_args(Score), score=score)
        super().__init__(context, agree=agree, with_keys=True)
        self.score, self.queries = score, queries
        # The last place takes what belongs to no token.
        self.tables.add("near", (context.kv_heads, context.regions.held + 1), torch.float32)
        self.tables.add("asked", (context.q_heads, context.head_dim), context.dtype)  # not added yet
        self.tables.add("length", (), torch.int64)  # tokens up to its own; 0: there is none
        self.tables.add("ends", (), torch.int64)  # where the ring begins
        self._step: Step | None = None  # the last eager step that asked
        self._unpaid: tuple[Tensor, Tensor] | None = None  # near and scores before it was paid, if it asked again

    def observe(self, seq: int, queries: Tensor, keys: Tensor, tokens: int) -> Tensor:
        mass = observed(queries[:, :, -(self.queries or keys.shape[1]) :], keys, scale=self.context.scale, agree=self.agree)
        positions = torch.arange(self.first + tokens, self.first + keys.shape[1], device=keys.device)
        self.tables["near"][seq].zero_()
        self.tables["near"][seq, :, self._places(positions)] = mass[:, tokens:]
        return mass[:, :tokens]

    def arrive(self, seq: int, start: int, stop: int) -> Tensor:
        return self.tables["near"][seq, :, self._places(torch.arange(start, stop, device=self.context.device))]

    def rank(self, seq: int, rows: Tensor, scores: Tensor) -> Tensor:
        held = self.context.regions.held
        recent = max(0, ((self.rows or rows.shape[1]) + held) // 2 - held)
        if self.score == "mean":
            newest = self.first + self.tokens[seq] + self.context.regions.window
            scores = scores / (newest - rows)
        return scores.masked_fill(rows >= self.first + self.tokens[seq] - recent, torch.inf)

    def build(self, seq: int, first: int, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        self.add()
        super().build(seq, first, keys, values, queries)
        self.tables["ends"][seq].fill_(first + self.tokens[seq])

    def append(self, seqs: Sequence[int], keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        self.add()
        super().append(seqs, keys, values, queries)
        for seq in seqs:
            self.tables["ends"][seq].fill_(self.first + self.tokens[seq])

    def select(self, query: Tensor, budget: int) -> Selection:
        selection = super().select(query, budget)
        if self.context.sequences is not None:
            batch, length = query.shape[0], self.tables["length"]
            self._remember_unpaid(query.device)
            self.add()
            self.tables["asked"][:batch] = query
            length[:batch] = self.context.sequences.on_device.lengths[:batch]
        return selection

    def truncate(self, seq: int, length: int) -> None:
        """See Index. Tokens that return to the ring start over."""
        super().truncate(seq, length)
        if seq < len(self.tokens):
            self.tables["near"][seq].zero_()
            self.tables["length"][seq].zero_()
            self.tables["ends"][seq].fill_(self.first + self.tokens[seq])

    def unask(self) -> None:
        """See Index. The first call of several undoes what all queries of the step paid."""
        self.tables["length"].zero_()
        for table, before in zip((self.tables["near"], self.tables["scores"]), self._unpaid or (), strict=False):
            table.copy_(before)
        self._step = self._unpaid = None

    def _remember_unpaid(self, device: torch.device) -> None:
        """Copy the scores before the second query of a step, by a layer that shares the keys, adds the first query's weights."""
        sequences = self.context.sequences
        step = None if sequences is None or capturing(device) else sequences.step or sequences.latest
        if step is None or step is not self._step:
            self._step, self._unpaid = step, None
        elif self._unpaid is None:
            self._unpaid = self.tables["near"].clone(), self.tables["scores"].clone()

    def export(self, seq: int) -> Held:
        self.add()
        return super().export(seq)

    def add(self) -> None:
        """Add the last queries' weights to each token's score, and drop the queries. Device work of fixed shape."""
        slab = self.context.slab
        if slab is None or not self.tokens:
            return
        seqs, places = min(slab.data.shape[0], len(self.tokens)), self.context.regions.held
        tables = {name: table[:seqs] for name, table in self.tables.items()}
        near, length, end = tables["near"], tables["length"], torch.clamp(tables["ends"], min=self.first)
        newest = torch.where(length > 0, newest_place(length, self.context.regions), places)[:, None, None]
        near.scatter_(2, newest.expand(-1, near.shape[1], 1), 0.0)  # the slot had another token before
        in_slab = held(length, end, self.context.regions)[:, None, None]
        kept = (tables["kept"] >= 0) & (length > 0)[:, None, None]
        known = torch.cat((in_slab.expand(-1, near.shape[1], -1, -1), kept[:, :, None]), dim=3)
        keys = torch.cat((slab.keys[:seqs, :, :places], tables["keys"]), dim=2).float()
        logits = tables["asked"].float().unflatten(1, (near.shape[1], -1)) @ keys.transpose(2, 3) * self.context.scale
        weights = torch.softmax(logits.masked_fill(~known, -torch.inf), dim=3).masked_fill(~known, 0.0)
        paid = weights.mean(dim=2) if self.agree == "mean" else weights.amax(dim=2)
        near[:, :, :places] += paid[:, :, :places]
        tables["scores"] += paid[:, :, places:]
        length.zero_()

    def _places(self, positions: Tensor) -> Tensor:
        """Return the slots of these positions in sink and ring."""
        return place_of(positions, self.context.regions.sink, self.context.regions.ring)
