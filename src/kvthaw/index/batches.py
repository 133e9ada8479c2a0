"""Batches of tokens that become units among themselves: what clusters and tree nodes have in common."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvthaw.cache.index_api import IndexContext
from kvthaw.index.draws import stream
from kvthaw.index.target import Full, Target
from kvthaw.index.unit_counts import Seq
from kvthaw.index.units import UnitIndex
from kvthaw.kernels.unit_select import Policy

AT_ONCE = 1 << 28
"""Bytes of keys that are clustered at once, of one layer at least: many sequences' need much memory."""
_SHORT = 1 << 23
"""Bytes of a layer's keys up to which a prompt waits for those of other layers: few keys keep no GPU busy, and launches take the
host longer than the model's own."""


@dataclass(frozen=True, slots=True)
class Batches:
    """Of sequences of an index, batches of tokens that become units among themselves, and where the first is. given: their keys
    [R, H, n, T, D], n batches of each sequence; None: one each, whose keys the index has."""

    index: BatchedIndex
    first: Sequence[Full]
    given: Tensor | None = None

    def keys(self) -> Tensor:
        """Return the keys [R, H, n, T, D], a copy if the index has them."""
        return self.index.last(self.first, self.index.recent)[:, :, None] if self.given is None else self.given


class BatchGroup:
    """Batches of indexes that differ in nothing but the layer, all of as many tokens and batches: keys [M, H, n, T, D], their
    positions [M, 1, n, T], and the numbers of their heads [M, H, 1, 1], from which random choices derive."""

    def __init__(self, every: Sequence[Batches]) -> None:
        self.every = every
        keys = torch.cat([each.keys() for each in every]) if len(every) > 1 else every[0].keys().contiguous()
        of_rows = [(each.index.first, stream(each.index.context), own) for each in every for own in each.first]
        where = [(first + own.begin, own.begin, number) for first, number, own in of_rows]
        first, begin, streams = torch.tensor(where).to(keys.device, non_blocking=True).t()[:, :, None, None, None].unbind()
        heads, batches, tokens = keys.shape[1:4]
        self.starts = torch.arange(batches, device=keys.device)[:, None] * tokens  # of each batch
        self.positions = first + self.starts + torch.arange(tokens, device=keys.device)
        self.streams = streams + torch.arange(heads, device=keys.device)[:, None, None]
        self.keys, self._first, self._begin = keys, first, begin

    def write(self, digests: Tensor, order: Tensor, stops: Tensor) -> None:
        """Write the units of all batches into the tables: digests [M H n, C, E]; order [M H n, T] of a batch's tokens, in which
        unit c is stops[c] : stops[c + 1], [M H n, C + 1]."""
        many, heads, batches, tokens = self.keys.shape[:4]
        count = stops.shape[1] - 1
        digests = digests.view(many, heads, batches * count, -1).to(self.every[0].index.digests.dtype)
        ends = (stops.view(many, heads, batches, -1)[..., 1:] + self.starts + self._begin).flatten(2)
        ends = torch.cat((self._begin[..., 0].expand(-1, heads, 1), ends), dim=2).int()
        places = (order.view(many, heads, batches, tokens) + self.starts + self._first).int().flatten(2)
        targets: dict[tuple[Full, ...], Target] = {}
        done = 0
        for each in self.every:
            own, rows = tuple(each.first), slice(done, done + len(each.first))
            if own not in targets:
                targets[own] = Target.of(own, heads, self.keys.device)
            at = targets[own]
            assert each.index.order is not None
            each.index.digests[at.units(batches * count)] = digests[rows]
            each.index.stops[at.units(batches * count + 1)] = ends[rows]
            each.index.order[at.places(batches * tokens)] = places[rows]
            done += len(each.first)


class BatchedIndex(UnitIndex):
    """An index whose tokens are made into units batch by batch: `per_batch` units of a batch, as many as count of a prompt.

    A batch waits for those of other layers, which have theirs at the same step, and all are formed at once; so does a short prompt.
    """

    mapped = True

    def __init__(self, context: IndexContext, *, batch: int, per_batch: int, width: int, policy: Policy) -> None:
        self.per_batch = per_batch
        super().__init__(context, size=batch // per_batch, batch=batch, width=width, policy=policy)

    def make_room(self, seqs: int, tokens: int) -> None:
        super().make_room(seqs, tokens)
        if self.context.device.type == "cuda" and tokens >= self.batch and not any(seq.tokens for seq in self.seqs):
            self._deferred.once((self.kind(), "load"), self._load)

    def _load(self) -> None:
        """Have CUDA load what forming a batch takes, some 40 ms, before there are tokens: the step that fills the first one should
        not wait for that."""
        none = Batches(self, [Full(seq, 0, 0) for seq in range(len(self.seqs))])
        form([none, none], self.per_batch)

    def form(self, group: BatchGroup, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Make `count` units of each batch of a group. Returns their digests, order and stops as `BatchGroup.write` takes them."""
        raise NotImplementedError

    @property
    def settings(self) -> Hashable:
        """What units depend on besides keys, positions and heads."""
        raise NotImplementedError

    def kind(self) -> Hashable:
        """Return what indexes have in common whose batches are formed at once."""
        context = self.context
        return type(self), context.kv_heads, context.head_dim, context.dtype, context.device, context.seed, self.settings

    def form_now(self, first: Sequence[Full], keys: Tensor, count: int) -> None:
        """Make `count` units of each of some batches of sequences, keys [R, H, n, T, D], of which the first is given."""
        form([Batches(self, first, keys)], count)

    def build_prompt(self, seq: int, first: int, keys: Tensor, count: int) -> None:
        """Begin a sequence with a prompt, keys [H, T, D], of which `count` units are made: with those of other layers where it is
        short, else beside the current stream."""
        tokens, given = keys.shape[1], Batches(self, (Full(seq, 0, 0),), keys[None, :, None])
        if not 0 < keys.nbytes <= _SHORT:
            self.build_beside(seq, first, tokens, count, partial(form, [given], count), keys)
            return
        self.clear(seq, first)
        self.reserve(0, count + 1, tokens)
        self.defer((self.kind(), "prompt", tokens, count), partial(form, count=count), given, [seq])
        self._set(seq, Seq(tokens, count, 0, [(0, 0), (tokens, count)]))

    def build_beside(self, seq: int, first: int, tokens: int, count: int, job: Callable[[], None], *used: Tensor) -> None:
        """Begin a sequence with a prompt of so many tokens, of which a job makes `count` units, a batch of its own, beside the
        current stream. used: tensors of others that it reads."""
        self.clear(seq, first)
        if tokens:
            self.reserve(0, count + 1, tokens)
            self.beside(job, *used)
            self._set(seq, Seq(tokens, count, 0, [(0, 0), (tokens, count)]))

    def close(self, full: Sequence[Full], keys: Tensor | None) -> None:
        if keys is None:
            work = partial(form, count=self.per_batch)
            self.defer((self.kind(), "form", tuple(full)), work, Batches(self, full), (own.seq for own in full))
        else:
            self.form_now(full, keys, self.per_batch)


def form(every: Sequence[Batches], count: int) -> None:
    """Make `count` units of each batch and write them into the tables, as many batches at once as have AT_ONCE bytes of keys. All
    have as many tokens and batches, and their indexes differ in nothing but the layer."""
    first = every[0]
    some = max(1, AT_ONCE // (first.index.recent[0].nbytes * len(first.first) if first.given is None else first.given.nbytes))
    for at in range(0, len(every), some):
        group = BatchGroup(every[at : at + some])
        group.write(*group.every[0].index.form(group, count))
