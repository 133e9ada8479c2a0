"""New token orders of sequences, static tokens first (PRKV): computed in pieces during the steps, and published atomically."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvthaw.cache.streams import AuxStream, SpreadWork
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


def spans(heads: int, tokens: int, key_bytes: int) -> list[slice]:
    """Return the tokens of a sequence that are observed at once; how many sequences there are does not matter."""
    most = max(1, _OBSERVED // (heads * key_bytes))
    return [slice(at, min(at + most, tokens)) for at in range(0, tokens, most)]


def reordered(
    keys: Tensor, queries: Tensor, weights: Tensor, *, scale: float, count: int, first: int, page: int, spread: Spread
) -> Generator[None, None, list[Reordering]]:
    """Choose the static tokens of R sequences and make the pages of their other tokens, in pieces that take about as long.

    Each of `spans` is a piece three times.

    keys: [R, H, T, D].
    queries, weights: [R, H, W, D] and [R, W].
    count: how many tokens are static.
    first: the position of the first token.
    """
    seqs, heads, tokens, dim = keys.shape
    keys, queries, weights = keys.flatten(0, 1), queries.flatten(0, 1), weights.repeat_interleave(heads, dim=0)
    parts, sums, masses, pages = spans(heads, tokens, dim * keys.itemsize), list[Tensor](), list[Tensor](), list[Tensor]()
    for span in parts:
        sums.append(log_sums(queries, keys[:, span], scale=scale))
        yield
    total = sums[0] if len(sums) == 1 else torch.stack(sums).logsumexp(dim=0)
    for span in parts:
        masses.append(mass(queries, keys[:, span], total, weights, scale=scale))
        yield
    order = choose_static(masses[0] if len(masses) == 1 else torch.cat(masses, dim=1), count, first)
    others = tokens - count
    for span in parts:  # the others are cut where the tokens are, at whole pages
        start, stop = (count + min(at // page * page, others) for at in (span.start, span.stop))
        rest = (order[:, start : tokens if span.stop == tokens else stop] - first).long()
        pages.append(page_bounds(keys, page, spread=spread, order=rest))
        yield
    digests = pages[0] if len(pages) == 1 else torch.cat(pages, dim=1)
    ends = torch.arange(digests.shape[1] + 1, device=order.device) * page
    stops = (count + ends.clamp(max=others)).expand(len(order), -1)
    kept = (others - 1) % page + 1 if others else 0
    rest = (order[:, tokens - kept :, None] - first).long()
    tail = keys.gather(1, rest.expand(-1, -1, dim))
    of_seqs = (tensor.unflatten(0, (seqs, heads)).unbind() for tensor in (order, digests, stops.int(), tail))
    return [Reordering(own, count, *rows) for own, *rows in zip(*of_seqs, strict=True)]
