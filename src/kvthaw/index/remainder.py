"""What an index does not select, estimated from the mean key and the mean value of each page of consecutive tokens.

Exact top-k leaves out the long tail of a softmax: on real models 256 of 4,096 tokens hold about 90 % of the attention mass.
The estimate gives this tail its weight and its mean values. With the same rows the output is then closer to full
attention's.

Relatives: SparQ Attention (Ribar et al., 2024) adds the mean value of all tokens; RetroInfer (Chen et al., 2025) estimates whole
clusters that it does not read; MagicPIG (Chen et al., 2024) and vAttention (Desai et al., 2025) sample. Here every page counts,
less the tokens of it that were selected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvthaw.cache.index_api import Index, IndexContext, Selection
from kvthaw.cache.streams import AuxStream
from kvthaw.errors import ConfigError, at_least
from kvthaw.index.around import AroundIndex
from kvthaw.index.tables import Column, TablesOnDevice
from kvthaw.kernels.merge import Partial
from kvthaw.kernels.page_means import RING, Added, Start, page_means
from kvthaw.kernels.remainder import remainder
from kvthaw.kernels.row_format import E4M3, RowFormat

_SHORT = 1 << 22
"""An append of fewer bytes of keys waits for the other layers' appends."""
_STRETCH = 1 << 13
"""How many rows are read from the store at once."""


class PageMeans(TablesOnDevice):
    """Mean key and mean value of each page of the tokens that an index holds, computed again after a change of their number.

    means [B, H, P, *format.tail], in the model's dtype on a CPU, else in e4m3 with two scales a page. tail [B, H, RING page, 2,
    D]: the rows of the last tokens, from which the means of an open page are made again. known [B] int32: how many tokens a
    sequence has. All on the device, written in place while there is room. A truncation further back than the tail reads the
    rows of one page from the store.

    stored: build() and append() take the rows from the store, as an index on the host does.
    """

    means = Column()
    tail = Column()
    known = Column()

    def __init__(self, context: IndexContext, page: int, *, stored: bool = False) -> None:
        at_least(1, remainder=page)
        super().__init__(context)
        self.page, self.stored = page, stored
        heads, dim = context.kv_heads, context.head_dim
        self.format = (RowFormat if context.device.type == "cpu" else E4M3)(dim, context.dtype)
        self.tables.add("means", (heads, "pages", *self.format.tail), self.format.stored)
        self.tables.add("tail", (heads, RING * page, 2, dim), context.dtype)
        self.tables.add("known", (), torch.int32)
        self.counts = self.tables.host(int)
        self._oldest = self.tables.host(int)  # of each sequence the first token in the tail

    def make_room(self, seqs: int, tokens: int) -> None:
        self.tables.reserve(seqs, pages=-(-tokens // (16 * self.page)) * 16)

    def lengths(self, seq: int) -> dict[str, int]:
        return {"pages": -(-self.counts[seq] // self.page)}

    def build(self, seq: int, first: int, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        self.clear(seq, first)
        self.append([seq], keys[None], values[None], None)

    def append(self, seqs: Sequence[int], keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        """Append keys, values [R, H, n, D] to R sequences; join() appends few tokens later, all layers at once."""
        if self.stored:
            for seq in seqs:
                self.read(seq, keys.shape[2])
        elif keys.shape[2]:
            self._append(seqs, keys, values)

    def read(self, seq: int, n: int) -> None:
        """Append the next n rows of a sequence from the store, a stretch at a time."""
        self.make_room(seq + 1, 0)
        while n > 0:
            begin, some = self.first + self.counts[seq], min(n, _STRETCH)
            rows = self.context.store.read(seq, begin, begin + some).to(self.tail)
            self._append([seq], rows[None, :, :, 0].contiguous(), rows[None, :, :, 1].contiguous())
            n -= some

    def _append(self, seqs: Sequence[int], keys: Tensor, values: Tensor) -> None:
        n = keys.shape[2]
        self.make_room(max(seqs) + 1, 0)
        starts = tuple(Start(seq, self.counts[seq]) for seq in seqs)
        stop, room = max(start.tokens for start in starts) + n, self.means.shape[2] * self.page
        self.make_room(0, stop if stop <= room else stop + stop // 8)
        for seq in seqs:
            self.counts[seq] += n
            self._oldest[seq] = max(self._oldest[seq], self.counts[seq] - self.tail.shape[2])
        if self.context.deferred is None or keys.nbytes > _SHORT:
            self.join()
            _enter([(self, keys, values)], starts)
        else:
            alike = starts, keys.shape, keys.stride(), values.stride(), keys.dtype, self.page, self.context.device
            self._deferred.defer(self, (PageMeans, *alike), partial(_enter, starts=starts), (self, keys, values), seqs)

    def truncate(self, seq: int, length: int) -> None:
        """Forget positions >= length of a sequence; 0 empties it."""
        keep = max(0, length - self.first)
        if seq >= len(self.counts) or keep >= self.counts[seq]:
            return
        self.join()
        self.counts[seq] = keep
        page, rest = divmod(keep, self.page)
        begin = keep - rest
        if rest:
            if begin < self._oldest[seq]:
                self.context.store.wait()
                stored = self.context.store.read(seq, self.first + begin, self.first + keep)
                self.tail[seq].index_copy_(1, self._places(begin, keep), stored.to(self.tail))
            rows = self.tail[seq].index_select(1, self._places(begin, keep))
            self.means[seq, :, page] = self.format.encode(rows.mean(dim=1, dtype=torch.float32))
        self._oldest[seq] = min(self._oldest[seq], begin)
        self.known.copy_(self.numbers())

    def looked_at(self, batch: int) -> int:
        """Return how many pages of the first sequences a step reads."""
        pages = [-(-count // self.page) for count in self.counts[:batch]]
        return max(1, self.context.looked_at(pages, self.means.shape[2], lambda tokens: -(-tokens // self.page)))

    def _places(self, start: int, stop: int) -> Tensor:
        return torch.arange(start, stop, device=self.tail.device) % self.tail.shape[2]

    def numbers(self) -> Tensor:
        """Return the tokens of all sequences, on the device."""
        return self._deferred.numbers([tuple(self.counts)], self.context.device)[0]


def _enter(every: Sequence[tuple[PageMeans, Tensor, Tensor]], starts: Sequence[Start]) -> None:
    """Append keys and values to the pages of several layers."""
    pages = [own for own, _, _ in every]
    added = [Added(keys, values, own.tail, own.means) for own, keys, values in every]
    page_means(added, starts, pages[0].page, pages[0].format)
    torch._foreach_copy_([own.known for own in pages], [own.numbers() for own in pages])


class RemainderIndex(AroundIndex, tested=True):
    """An index, and an estimate of the attention to the tokens that it does not select.

    A page has n tokens, mean key C and mean value V, and a step selects m of its tokens. The rest weigh (n - m) exp(scale q.C)
    and have the value V; see `kvthaw.kernels.remainder`. Tokens whose scores the index estimated, as one of codes does, weigh by
    these scores instead. What selects, and its rows, do not change. On a GPU the side stream computes the estimate while the
    current stream fetches the rows.

    make: builds the index that selects.
    page: tokens of a page, int.

    Raises ConfigError for an index that attends to tokens itself, replaces keys or forgets tokens. Raises it for one on the
    device that cannot undo appends, and for one on the host of a GPU. Where the model is on a CPU, an index on the host serves.
    """

    def __init__(self, context: IndexContext, *, make: Callable[[IndexContext], Index], page: int) -> None:
        inner = make(context)
        traits, who = inner.traits, type(inner).__name__
        if traits.attends or traits.rebuilds or traits.evicts or not (traits.reversible or traits.on_host):
            raise ConfigError(
                f"remainder is {page} and {who} selects the rows; allowed: an index that keeps every token and attends to none "
                "itself, as oracle, pariskv, quest, clusterkv and icecache have"
            )
        if traits.on_host and context.device.type not in ("cpu", "meta"):  # meta: bytes alone are counted
            raise ConfigError(
                f"remainder is {page} and {who} selects the rows on the host of {context.device}; it must be 0 there: take an "
                "index on the device, as thaw has"
            )
        self.pages = PageMeans(replace(context, deferred=None) if traits.on_host else context, page, stored=traits.on_host)
        self.pages.make_room(context.store.seqs, 0)
        super().__init__(context, inner, self.pages)
        self.traits = replace(self.traits, attends=True, snapshots=traits.snapshots)
        self._beside = context.aux or AuxStream()

    def export(self, seq: int) -> Any:
        return self.inner.export(seq) if self.traits.snapshots else super().export(seq)

    def state(self, held: Any) -> Mapping[str, Tensor]:
        return self.inner.state(held)

    def load(self, seq: int, held: Any, end: int) -> None:
        """See Tables. An index with snapshots saves no means; they are computed again from the rows in the store."""
        if not self.traits.snapshots:
            super().load(seq, held, end)
            return
        self.inner.load(seq, held, end)
        self.pages.clear(seq, self.context.regions.sink)
        self.pages.read(seq, end - self.pages.first)

    def select(self, query: Tensor, budget: int) -> Selection:
        """See Index. Raises ConfigError where the query heads of a KV head choose rows of their own."""
        return self._estimate(self.inner.select(query, budget), query)

    def _estimate(self, found: Selection, query: Tensor) -> Selection:
        """Return a selection with the estimate of what it leaves out, computed on a side stream while the rows are fetched."""
        batch, pages = query.shape[0], self.pages
        pages.join()
        if found.log_weight is not None:
            raise ConfigError(f"remainder is {pages.page}; it must be 0 where each query head has rows or weights of its own")
        pages.make_room(batch, 0)
        means = pages.means[:batch, :, : pages.looked_at(batch)]
        known, scale, estimates = pages.known[:batch], self.context.scale, list[Partial]()

        def estimate() -> None:
            how: dict[str, Any] = {"first": pages.first, "page": pages.page, "scale": scale, "estimated": found.estimated}
            estimates.append(remainder(query, means, found.rows, known, pages.format, **how))

        done = self._beside.run(query.device, estimate)
        used = [] if done is None or found.estimated is None else [found.estimated.scores, found.estimated.marks]
        return Selection(found.rows, found.counts, partial=replace(estimates[0], done=done, reads=used))
