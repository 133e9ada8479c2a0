"""New token orders of sequences, static tokens first (PRKV): computed in pieces during the steps, and published atomically."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvthaw.cache.deferred_batch import AuxStream, SpreadWork
from kvthaw.kernels.observe import log_sums, mass
from kvthaw.kernels.page_bounds import Spread, page_bounds

_OBSERVED = 1 << 27
"""Bytes of a sequence's keys that the window's queries are multiplied with at once."""


@dataclass(slots=True)
class Reordering:
    """A new order of a sequence's tokens, ready to be published.

    order: [H, T] int32 positions: static tokens, best first, then the others in text order.
    static: number of static tokens.
    digests: [H, P, 2 D], of the others' pages.
    stops: [H, P + 1] int32, where these pages begin in the order.
    tail: the keys of a last page that is not full.
    done: event that passes when all of this is computed.
    """

    order: Tensor
    static: int
    digests: Tensor
    stops: Tensor
    tail: Tensor
    done: torch.cuda.Event | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        return self.order, self.digests, self.stops, self.tail

    def wait(self) -> None:
        """Make the current stream wait for the tensors. The host does not wait."""
        if self.done is not None:
            stream = torch.cuda.current_stream(self.order.device)
            stream.wait_event(self.done)
            for tensor in self.tensors():
                tensor.record_stream(stream)

    def to(self, device: torch.device) -> Reordering:
        """Return a copy on a device, made on the current stream."""
        self.wait()
        order, *rest = (tensor.to(device, copy=True) for tensor in self.tensors())
        return Reordering(order, self.static, rest[0], rest[1], rest[2])


@dataclass(frozen=True, slots=True)
class PendingReordering:
    """A reordering that the next append puts in place.

    made: once the work is done, the reorderings of all sequences that were computed together, by their numbers at that time.
    """

    seq: int
    made: dict[int, Reordering]
    aux: AuxStream
    work: SpreadWork

    def take(self) -> Reordering:
        """Run the remaining work and return the reordering."""
        self.aux.finish(self.work)
        made = self.made[self.seq]
        made.done = self.work.done
        return made

    def to(self, device: torch.device) -> PendingReordering:
        """Return a copy on a device, made on the current stream."""
        return PendingReordering(0, {0: self.take().to(device)}, self.aux, SpreadWork(device))


def choose_static(mass: Tensor, count: int, first: int) -> Tensor:
    """Return the order of T tokens by PRKV's algorithm 1, lines 9-11: [H, T] int32 positions from `first` on.

    The `count` tokens with the most mass come first, by mass. The others follow in text order. No host sync.

    mass: [H, T].

    The j-th of the others comes j places after the static tokens that have at most j others before them. (A prefix sum
    along T would also work, but a GPU computes a row of it in a single block, part by part.)
    """
    heads, tokens = mass.shape
    top = torch.topk(mass, count, dim=1).indices.int()
    before = top.sort(dim=1).values - torch.arange(count, dtype=torch.int32, device=mass.device)
    others = torch.arange(tokens - count, dtype=torch.int32, device=mass.device).repeat(heads, 1)
    others += torch.searchsorted(before, others, right=True, out_int32=True)
    return first + torch.cat((top, others), dim=1)


@dataclass(slots=True)
class StaticChoice:
    """The choice of the static tokens of R sequences, and the pages of their other tokens, in pieces that take about as long.

    keys [R H, T, D]; queries [R H, W, D] and their weights [R H, W].
    count: how many tokens are static.
    first: the position of the first one. made, once all jobs are done in order: of each sequence its Reordering. A job that
        failed may be done again.
    """

    keys: Tensor
    queries: Tensor
    weights: Tensor
    scale: float
    count: int
    first: int
    page: int
    spread: Spread
    seqs: int
    made: list[Reordering] = field(default_factory=list)
    _sums: dict[int, Tensor] = field(default_factory=dict)
    _mass: dict[int, Tensor] = field(default_factory=dict)
    _order: list[Tensor] = field(default_factory=list)
    _digests: dict[int, Tensor] = field(default_factory=dict)

    @staticmethod
    def spans(heads: int, tokens: int, key_bytes: int) -> list[slice]:
        """Return the tokens of a sequence that are observed at once; how many sequences there are does not matter."""
        most = max(1, _OBSERVED // (heads * key_bytes))
        return [slice(at, min(at + most, tokens)) for at in range(0, tokens, most)]

    def observe(self, span: slice) -> None:
        """Add some tokens to the denominators of the queries' softmax."""
        self._sums[span.start] = log_sums(self.queries, self.keys[:, span], scale=self.scale)

    def weigh(self, span: slice) -> None:
        """Compute the attention mass of tokens that have all been observed."""
        sums = list(self._sums.values())
        total = sums[0] if len(sums) == 1 else torch.stack(sums).logsumexp(dim=0)
        self._mass[span.start] = mass(self.queries, self.keys[:, span], total, self.weights, scale=self.scale)

    def choose(self) -> None:
        """Choose the static tokens, once all tokens have been weighed."""
        weighed = list(self._mass.values())
        self._order = [choose_static(weighed[0] if len(weighed) == 1 else torch.cat(weighed, dim=1), self.count, self.first)]

    def bound(self, span: slice) -> None:
        """Make pages of the others, as many as some tokens have."""
        (order,), tokens = self._order, self.keys.shape[1]
        start, stop = (self.count + min(at // self.page * self.page, tokens - self.count) for at in (span.start, span.stop))
        stop = tokens if span.stop == tokens else stop
        rest = (order[:, start:stop] - self.first).long()
        self._digests[span.start] = page_bounds(self.keys, self.page, spread=self.spread, order=rest)

    def finish(self) -> None:
        """Put the pages together."""
        (order,), tokens = self._order, self.keys.shape[1]
        others, made = tokens - self.count, list(self._digests.values())
        digests = made[0] if len(made) == 1 else torch.cat(made, dim=1)
        ends = torch.arange(digests.shape[1] + 1, device=order.device) * self.page
        stops = (self.count + ends.clamp(max=others)).expand(len(order), -1)
        kept = (others - 1) % self.page + 1 if others else 0
        rest = (order[:, tokens - kept :, None] - self.first).long()
        tail = self.keys.gather(1, rest.expand(-1, -1, self.keys.shape[2]))
        of_seqs = (tensor.unflatten(0, (self.seqs, -1)).unbind() for tensor in (order, digests, stops.int(), tail))
        self.made = [Reordering(own, self.count, *pages) for own, *pages in zip(*of_seqs, strict=True)]
