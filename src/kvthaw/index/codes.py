"""ParisKV's index: every decision is taken on the device, from a summary of 112 or 80 bytes a key (head_dim 128).

query -> planes: its coarse coordinates -> signs: votes of each key, or tiers: votes of each centroid -> collide: of each key
      -> bucket_topk: candidates -> rerank: estimated scores -> topk: rows
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor

from kvthaw.cache.index_api import Index, IndexContext, Selection, Traits
from kvthaw.errors import ConfigError, at_least, one_of, within
from kvthaw.index.ratios import Ratios
from kvthaw.index.tables import Held, TablesOnDevice
from kvthaw.kernels.bucket_topk import bucket_topk
from kvthaw.kernels.collide import BINS, CHUNK, collide, shift
from kvthaw.kernels.decode_step import AnyOrder, DecodeStep
from kvthaw.kernels.encode import CENTROIDS, SUB, Summaries, count, encode, make_quantizer
from kvthaw.kernels.flash_decode import definition as attend
from kvthaw.kernels.gpu import upload
from kvthaw.kernels.held_mass import held_mass
from kvthaw.kernels.merge import Partial
from kvthaw.kernels.planes import planes
from kvthaw.kernels.query import Rotated
from kvthaw.kernels.remainder import Estimated
from kvthaw.kernels.rerank import TILE, Estimates, rerank
from kvthaw.kernels.signs import signs
from kvthaw.kernels.srht import make_rotation
from kvthaw.kernels.tiers import most_votes, tiers
from kvthaw.kernels.topk import Floor, run_length, topk

Policy = Literal["max", "mean_query"]
"""How the query heads of a group agree on tokens: by the largest of their softmax weights, or by the score of their mean query."""
_SHORT = 1 << 22
"""Largest size of a layer's keys, in bytes, that is summarised together with other layers' keys."""


class CodesIndex(TablesOnDevice, Index, tested=True):
    """Collisions choose candidates, codes of 4 or 3 bits rank them.

    policy: how the G query heads of a KV head agree. "max" computes votes and softmax weights for each head, and uses the
        largest. "mean_query" uses the mean of the queries. On the shipped model (32k tokens, 100 rows) "max" selects 0.828 of
        the exact rows and covers 0.676 of the softmax, "mean_query" 0.566 and 0.667.
    ratios: see Ratios.
    graded: a key's votes are the similarity of its signs to the query instead of tiers by rank. The rho of ratios then has
        no effect.
    centre: subtract the mean of a sequence's first keys from all of its keys before summarising them. This shifts all
        scores of a query by the same number, so that ranks stay. The shorter vectors have more informative signs.
    code_bits: of a coordinate's code. 4, as the paper: 112 bytes a key of 128 dimensions. 3: half the magnitudes, and weights in 8
        bits in the same words: 80 bytes.
    dense_below: attend in full to a sequence with a shorter region. The index keeps its first keys and values on the
        device, [L, H, dense_below, D] each. The selection then has no rows; its partial holds the attention. The budget
        does not limit this attention, and a softcap is not applied. 0 disables it.
    tolerance: the index does not select a row whose weight is less, unless the budget covers a sequence. 0: it selects as
        many as it may.

    tables: all tensors of the sequences, by name.
    counts: tokens of each sequence.

    make_room gives summaries their capacity; an append beyond it doubles it. Otherwise no tensor moves. Lengths and limits are
    int32 on the device. A sequence's number of candidates depends only on its own length. On a GPU select() launches five
    kernels of fixed shape, and one more with tolerance. On a CPU the same steps run in torch.
    """

    def __init__(
        self,
        context: IndexContext,
        *,
        policy: Policy = "max",
        ratios: Ratios | None = None,
        graded: bool = False,
        centre: bool = False,
        code_bits: Literal[3, 4] = 4,
        dense_below: int = 0,
        tolerance: float = 0.0,
    ) -> None:
        one_of(get_args(Policy), policy=policy)
        if context.head_dim < SUB:
            raise ConfigError(f"head_dim is {context.head_dim}; pariskv needs at least {SUB}, one subspace")
        one_of((3, 4), code_bits=code_bits)
        at_least(0, dense_below=dense_below)
        within(0, 1, tolerance=tolerance)
        if tolerance and policy == "mean_query":
            raise ConfigError(f"tolerance is {tolerance:g}; with policy={policy!r} it must be 0, since that one weighs no rows")
        self._least = math.log(tolerance) if tolerance else None
        super().__init__(context)
        self.policy, self.ratios, self.dense_below = policy, ratios or Ratios(), dense_below
        self._enough(context.rows)
        dim, seed, device = context.head_dim, context.seed, context.device
        self.rotation = self._deferred.once(("rotation", dim, seed, device), lambda: make_rotation(dim, seed, device=device))
        self.quantizer = self._deferred.once(("quantizer", code_bits, device), lambda: make_quantizer(device, code_bits))
        subs = self.rotation.padded // SUB
        self.graded, self.centred = graded, centre
        self._alike = seed, graded, centre, code_bits, device
        self._shift = shift(most_votes(subs))
        self.traits = Traits(graph_safe=True, grows=not centre, light=True, reversible=True, attends=dense_below > 0)
        self._k, heads = 1, context.kv_heads
        columns: dict[str, tuple[tuple[int | str, ...], torch.dtype]] = {
            "ids": ((heads, subs, "tokens"), torch.uint8),
            **self.quantizer.tables(heads, subs),
            "sizes": ((heads, subs, 0 if graded else CENTROIDS), torch.int32),  # only tiers ask how many keys a cluster has
            "lengths": ((), torch.int32),
            "wanted": ((), torch.int32),
            "limits": ((6,), torch.int32),
        }
        if dense_below:
            columns |= dict.fromkeys(("keys", "values"), ((heads, dense_below, dim), context.dtype))
        if centre:
            columns["centre"] = (heads, dim), torch.float32
        for name, (shape, dtype) in columns.items():
            self.tables.add(name, shape, dtype)
        self.counts = self.tables.host(int)
        self.make_room(context.store.seqs, 0)

    # Changes

    def make_room(self, seqs: int, tokens: int) -> None:
        capacity = max(CHUNK, -(-tokens // CHUNK) * CHUNK)
        if self.tables.lacks(seqs, tokens=capacity):
            self.join()
            self.tables.reserve(seqs, tokens=capacity)

    def lengths(self, seq: int) -> dict[str, int]:
        return {"tokens": self.counts[seq]}

    def build(self, seq: int, first: int, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        self.clear(seq, first)
        if self.centred and keys.shape[1]:
            self.tables["centre"][seq] = keys.mean(dim=1, dtype=torch.float32).to(keys.dtype)
        self.append([seq], keys[None], values[None], None)

    def append(self, seqs: Sequence[int], keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        n = keys.shape[2]
        self.make_room(max(seqs) + 1, 0)
        starts = [self.counts[seq] for seq in seqs]
        have, stop = self.summaries.capacity, max(starts) + n
        self.make_room(0, stop if stop <= have else max(stop, 2 * have))
        waits = self.context.deferred is not None and 0 < keys.nbytes <= _SHORT
        if not waits:
            _summarise([(self, keys)], seqs, starts)
        for i, (seq, start) in enumerate(zip(seqs, starts, strict=True)):
            near = min(n, self.dense_below - start)
            if near > 0:
                for name, new in (("keys", keys), ("values", values)):
                    self.tables[name][seq, :, start : start + near] = new[i, :, :near]
            self.counts[seq] = start + n
        if waits:
            kind = CodesIndex, tuple(seqs), tuple(starts), keys.shape, keys.dtype, self.tables["ids"].shape, self._alike
            self._deferred.defer(self, kind, partial(_enter, seqs=seqs, starts=starts), (self, keys), seqs)
        else:
            self._update()

    def truncate(self, seq: int, length: int) -> None:
        if seq < len(self.counts):
            old = self.counts[seq]
            new = min(old, max(0, length - self.first))
            if new < old:
                self.join()
                if not self.graded:
                    count(self.summaries, [seq], [new], [old], -1)
                self.counts[seq] = new
                self._update()

    def load(self, seq: int, held: Held, end: int) -> None:
        super().load(seq, held, end)
        self._update()

    # Queries

    def select(self, query: Tensor, budget: int) -> Selection:
        """See Index. Raises ConfigError where a fixed number of candidates is less than budget."""
        self.join()
        return replace(self.best(query, budget), partial=self.attention(query))

    def best(self, query: Tensor, budget: int) -> Selection:
        """Select the rows [B, H, budget] of the best estimates, ascending, -1 padded."""
        floor, scale = None, self.context.scale
        if self._least is not None:
            floor = Floor(self._least, self._held(query), self.tables["lengths"][: len(query)], budget)
        rotated, (candidates, marks), wanted = self.collect(query, budget)
        run = run_length(candidates.shape[2], budget) or TILE
        found = rerank(rotated, self.summaries, candidates, wanted, self.quantizer, scale, run)
        selected = topk(found, candidates, wanted, budget, self.first, scale, "max", floor)
        scores = found.scores if isinstance(found, Estimates) else found
        if scores.shape[2] < self.context.group:  # estimates of the group's mean query
            return Selection(*selected)
        centre = self.tables["centre"][: len(query)] if self.centred else None
        return Selection(*selected, estimated=Estimated(candidates, wanted, scores, marks, centre))

    def _held(self, query: Tensor) -> Tensor:
        """Return the log of the sum of exponentials over sink and ring, [B, H, G], as the codes' scores are shifted. -inf where
        the index has no layer."""
        slab, sequences, batch = self.context.slab, self.context.sequences, query.shape[0]
        if slab is None or sequences is None:
            return query.new_full((batch, self.context.kv_heads, self.context.group), -torch.inf, dtype=torch.float32)
        now, keys = sequences.on_device, slab.keys[:batch]
        centre = self.tables["centre"][:batch] if self.centred else keys.new_zeros(keys.shape[:2] + keys.shape[3:]).float()
        how: dict[str, Any] = {"regions": self.context.regions, "scale": self.context.scale}
        return held_mass(query, keys, now.lengths[:batch], now.starts[:batch], centre, **how)

    def collect(self, query: Tensor, budget: int) -> tuple[Rotated, tuple[Tensor, Tensor], Tensor]:
        """Run the first stage. Returns rotated queries [B, H, P, 8, subspaces], candidates [B, H, width] with their marks, and how
        many of them each sequence uses [B]. Raises ConfigError as select does."""
        self._enough(budget)
        batch = query.shape[0]
        self.make_room(batch, 0)
        if budget != self._k:
            self._k = budget
            self._update()
        data, now = self.tables, self.summaries
        lengths, wanted = data["lengths"][:batch], data["wanted"][:batch]
        n = max(1, self.context.looked_at(self.counts[:batch], now.capacity))
        ids = now.ids[:, :, :, : n if query.device.type == "cpu" else -(-n // CHUNK) * CHUNK]
        width = -(-max(budget, self.ratios.most(ids.shape[3], budget)) // TILE) * TILE
        heads = self.context.kv_heads
        totals = torch.empty(
            (batch, heads, BINS), dtype=torch.int32, device=query.device
        )  # a histogram of each KV head's votes
        if self.graded:
            rotated, bits = planes(query, self.rotation, heads, totals, mean=self.policy == "mean_query")
            scores = signs(bits, ids, lengths, totals)
        else:
            rotated, table = self.votes(query, totals)
            scores = collide(table, ids, lengths, totals, self._shift)
        return rotated, bucket_topk(scores, lengths, wanted, width), wanted

    def votes(self, query: Tensor, totals: Tensor) -> tuple[Rotated, Tensor]:
        """Return rotated queries and the packed votes of each centroid, as `kvthaw.kernels.tiers` does; clear totals."""
        sizes, limits = self.summaries.sizes[: len(query)], self.tables["limits"][: len(query)]
        return tiers(query, self.rotation, sizes, limits, totals, mean=self.policy == "mean_query")

    def _enough(self, budget: int) -> None:
        if self.ratios.candidates is not None and budget > self.ratios.candidates:
            raise ConfigError(f"candidates is {self.ratios.candidates}; it must be at least the {budget} rows to select")

    def attention(self, query: Tensor) -> Partial | None:
        """Return the attention to sequences below dense_below, [B, Hq, D]; None if there are none."""
        if not self.dense_below:
            return None
        if query.device.type == "cpu" and not any(0 < n < self.dense_below for n in self.counts[: query.shape[0]]):
            return None  # on a GPU it stays, for a captured step must serve sequences that shrink
        place = torch.arange(self.dense_below, device=query.device)
        lengths = self.tables["lengths"][: query.shape[0], None]
        visible = ((place < lengths) & (lengths < self.dense_below))[:, None].expand(-1, self.context.kv_heads, -1)
        keys, values = (self.tables[name][: query.shape[0]] for name in ("keys", "values"))
        return attend(DecodeStep(query, keys, values, scale=self.context.scale), AnyOrder(visible))

    # State

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), self.rotation.basis, self.quantizer.thresholds, self.quantizer.levels]

    def clone_from(self, other: Self) -> None:
        super().clone_from(other)
        self._k = other._k

    @property
    def summaries(self) -> Summaries:
        """Tables that kernels read."""
        data = self.tables
        return Summaries(data["ids"], data["codes"], data.get("weights"), data["sizes"])

    def _update(self) -> None:
        """Update lengths, numbers of candidates and tier limits on the device in place from the counts, once for all layers."""
        if self.counts:
            _update([self])

    def numbers(self) -> list[Tensor]:
        """Return lengths, numbers of candidates and tier limits of all sequences, on the device."""
        key = "codes", tuple(self.counts), self._k, self.ratios, self.dense_below, self.context.device
        return self._deferred.once(key, self._numbers)

    def _numbers(self) -> list[Tensor]:
        wanted = [0 if n < self.dense_below else self.ratios.wanted(n, self._k) for n in self.counts]
        limits = [end for n in self.counts for end in self.ratios.limits(n)]
        sent, n = upload([*self.counts, *wanted, *limits], torch.int32, self.context.device), len(self.counts)
        return [sent[:n], sent[n : 2 * n], sent[2 * n :].view(n, -1)]


def _summarise(given: Sequence[tuple[CodesIndex, Tensor]], seqs: Sequence[int], starts: Sequence[int]) -> None:
    """Write summaries of the next keys [R, H, n, D] of some sequences, in each of several indexes with equal settings."""
    first, every = given[0][0], [keys for _, keys in given]
    tables, centres = [index.summaries for index, _ in given], [index.tables["centre"] for index, _ in given if index.centred]
    encode(torch.cat(every) if len(every) > 1 else every[0], first.rotation, first.quantizer, tables, seqs, starts, centres)
    for summaries in () if first.graded else tables:
        count(summaries, seqs, starts, [start + every[0].shape[2] for start in starts])


def _enter(given: Sequence[tuple[CodesIndex, Tensor]], seqs: Sequence[int], starts: Sequence[int]) -> None:
    _summarise(given, seqs, starts)
    _update([index for index, _ in given])


def _update(indexes: Sequence[CodesIndex]) -> None:
    """As CodesIndex._update, of several."""
    tables, numbers = list[Tensor](), list[Tensor]()
    for index in indexes:
        tables += [index.tables[name] for name in ("lengths", "wanted", "limits")]
        numbers += index.numbers()
    torch._foreach_copy_(tables, numbers)
