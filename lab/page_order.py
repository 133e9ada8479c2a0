"""PRKV's and IceCache's rows copied as the papers say: in the order of an index's pages, or piece by piece.

PRKV's section 4.2, figure 22 and appendix H. Neither gains anything over token order (docs/notes/transfer.md), so kvthaw lacks
both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvthaw.cache.choice import BulkCopy, scatter
from kvthaw.cache.host import HostStore
from kvthaw.cache.host_memory import host_tensor
from kvthaw.cache.index_api import IndexContext, Method
from kvthaw.cache.pool import Slab
from kvthaw.errors import one_of
from kvthaw.index.forest import TreeIndex
from kvthaw.index.hybrid import HybridIndex
from kvthaw.index.reordering import Reordering
from kvthaw.kernels.row_format import RowFormat
from kvthaw.methods.icecache import icecache
from kvthaw.methods.prkv import prkv
from kvthaw.native import gather_rows

Way = Literal["bulk", "each"]
Layout = Literal["token", "page"]


@dataclass(frozen=True, slots=True)
class Pages:
    """Rows of one sequence in page order.

    rows: [H, P, *tail] on the host, in stored form.
    places: [H, end] int32, the place of each position in rows; -1 for none.
    """

    rows: Tensor
    places: Tensor


class PagedRows:
    """A snapshot of the page copies. Later changes do not affect it."""

    def __init__(self, pages: Mapping[int, Pages], format: RowFormat, *, pinned: bool) -> None:
        self._pages, self.format, self.pinned = pages, format, pinned

    def places(self, fetch: Tensor) -> Tensor:
        """Return the places of rows [B, H, M] int32 in their sequence's copy, -1 for rows that have none and for -1."""
        found = torch.full_like(fetch, -1)
        for seq, rows in enumerate(fetch):
            if (pages := self._pages.get(seq)) is not None:
                known = (rows >= 0) & (rows < pages.places.shape[1])
                places = pages.places.gather(1, rows.clamp(0, pages.places.shape[1] - 1).long())
                found[seq] = torch.where(known, places, -1)
        return found

    def gather(self, places: Tensor, out: Tensor) -> tuple[int, Tensor]:
        """Gather rows as `kvthaw.native.gather_rows` does, by places instead of positions."""
        count, parts = 0, []
        for seq, pages in sorted(self._pages.items()):
            if seq < len(places):
                table = torch.tensor([[pages.rows.data_ptr()]])
                found, which = gather_rows(table, pages.rows.shape[1], places[seq : seq + 1].contiguous(), out[count:])
                parts.append(which + seq * places[0].numel())
                count += found
        return count, torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def piece(self, seq: int, head: int, place: int, most: int) -> Tensor:
        """Return at most `most` rows of a head from `place` on, [n, *tail]."""
        return self._pages[seq].rows[head, place : place + most]


class PageCopy:
    """Copies of a layer's rows in an order in which each page of a head is contiguous in host memory.

    A background thread writes a copy in a new order. The old copy serves until the new one is complete. Later rows have no
    place in it. Copies take the rows' host memory again, twice while a new order is written. `host_bytes` does not count
    them.
    """

    def __init__(self, format: RowFormat, *, pinned: bool) -> None:
        self.format, self.pinned = format, pinned
        self._pages: dict[int, Pages] = {}
        self._coming: dict[int, Future[Pages]] = {}
        self._tokens: dict[int, int] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvthaw-pages")

    def tokens(self, seq: int) -> int:
        """Return how many rows of a head are in a sequence's copy, or will be once it is written."""
        return self._tokens.get(seq, 0)

    @property
    def writing(self) -> bool:
        """Whether a copy is still being written."""
        return any(not coming.done() for coming in self._coming.values())

    def rewrite(self, seq: int, order: Tensor, gather: Callable[[Tensor, Tensor], object]) -> None:
        """Start to copy a sequence's rows in a new order.

        order: [H, T] int32 positions on the CPU.
        gather: gather(rows [1, H, T], out [H T, *tail]) collects the rows.
        """
        self._finish(seq)
        self._tokens[seq] = order.shape[1]
        self._coming[seq] = self._thread.submit(self._copied, order, gather)

    def forget(self, seq: int) -> None:
        """Drop a sequence's copy, after waiting for one being written."""
        self._finish(seq)
        self._pages.pop(seq, None)
        self._tokens.pop(seq, None)

    def clear(self) -> None:
        """Drop all copies."""
        for seq in {*self._pages, *self._coming}:
            self.forget(seq)

    def now(self) -> PagedRows:
        """Return a snapshot of the copies that are complete."""
        for seq, coming in list(self._coming.items()):
            if coming.done():
                self._finish(seq)
        return PagedRows(dict(self._pages), self.format, pinned=self.pinned)

    def _finish(self, seq: int) -> None:
        coming = self._coming.pop(seq, None)
        if coming is not None:
            wait([coming])
            self._pages[seq] = coming.result()

    def _copied(self, order: Tensor, gather: Callable[[Tensor, Tensor], object]) -> Pages:
        heads, tokens = order.shape
        rows = host_tensor((heads * tokens, *self.format.tail), self.format.stored, pinned=self.pinned)
        gather(order[None], rows)
        places = torch.full((heads, int(order.max()) + 1 if tokens else 1), -1, dtype=torch.int32)
        places.scatter_(1, order.long(), torch.arange(tokens, dtype=torch.int32).expand(heads, -1))
        return Pages(rows.unflatten(0, (heads, tokens)), places)


class Copies:
    """The copies in page order of a method's stores."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[HostStore, PageCopy] = WeakKeyDictionary()

    def begin(self, store: HostStore) -> PageCopy:
        """Keep copies of a store's rows, none yet."""
        return self._of.setdefault(store, PageCopy(store.format, pinned=store.pinned))

    def of(self, store: HostStore) -> PageCopy | None:
        """Return the copies of a store's rows; None for a layer that follows another's choice."""
        return self._of.get(store)


def rewrite(pages: PageCopy, store: HostStore, seq: int, order: Tensor) -> None:
    """Start to copy a sequence's rows into page order [H, T] int32. The rows must be in place."""
    table, blocks = store.table.on_cpu()[seq : seq + 1], store.blocks(seq)  # which must not go meanwhile

    def gather(rows: Tensor, out: Tensor) -> None:
        gather_rows(table, store.block_size, rows, out)
        blocks.clear()

    pages.rewrite(seq, order.to("cpu", copy=True).contiguous(), gather)


class PagedHybridIndex(HybridIndex, tested=True):
    """PRKV's index. It copies a sequence's rows in the order of each plan that it puts in place."""

    def __init__(self, context: IndexContext, copies: Copies, **options: Any) -> None:
        super().__init__(context, **options)
        self.pages = copies.begin(context.store)

    def _place_alike(self, seqs: list[int], plans: list[Reordering]) -> None:
        super()._place_alike(seqs, plans)
        store = self.context.store
        for seq, plan in zip(seqs, plans, strict=True):
            if self.stored(seq, tokens := plan.order.shape[1]):
                store.wait()
                rewrite(self.pages, store, seq, self.order[seq, :, :tokens])

    def truncate(self, seq: int, length: int) -> None:
        self.pages.forget(seq)
        super().truncate(seq, length)

    def reorder(self, seqs: Sequence[int]) -> None:
        self.pages.clear()
        super().reorder(seqs)


class PagedTreeIndex(TreeIndex, tested=True):
    """IceCache's index. It copies a sequence's rows in the order of its pages whenever the sequence has grown by an eighth."""

    def __init__(self, context: IndexContext, copies: Copies, **options: Any) -> None:
        super().__init__(context, **options)
        self.pages = copies.begin(context.store)

    def build(self, seq: int, first: int, keys: Tensor, values: Tensor | None = None, queries: Tensor | None = None) -> None:
        super().build(seq, first, keys, values, queries)
        self._copy([seq])

    def append(self, seqs: Sequence[int], keys: Tensor, values: Tensor | None = None, queries: Tensor | None = None) -> None:
        super().append(seqs, keys, values, queries)
        self._copy(seqs)

    def load(self, seq: int, held: Any, end: int) -> None:
        super().load(seq, held, end)
        self._copy([seq])

    def truncate(self, seq: int, length: int) -> None:
        self.pages.forget(seq)
        super().truncate(seq, length)

    def reorder(self, seqs: Sequence[int]) -> None:
        self.pages.clear()
        super().reorder(seqs)

    def _copy(self, seqs: Sequence[int]) -> None:
        for seq in seqs:
            if 8 * self.forest.size(seq) > 9 * self.pages.tokens(seq):
                members = self.state(self.export(seq))["members"]
                rewrite(self.pages, self.context.store, seq, members + self.forest.first(seq))


class Stored:
    """A store's rows in token order."""

    def __init__(self, store: HostStore) -> None:
        self.store, self.format, self.pinned = store, store.format, store.pinned

    def gather(self, rows: Tensor, out: Tensor) -> tuple[int, Tensor]:
        """Gather rows as `kvthaw.native.gather_rows` does."""
        return self.store.gather(rows, out)

    def piece(self, seq: int, head: int, row: int, most: int) -> Tensor:
        """Return at most `most` rows of a head in one block, from `row` on, [n, *tail]."""
        number, offset = divmod(row, self.store.block_size)
        return self.store.table.blocks[seq][number].data[head, offset : offset + most]


Source = PagedRows | Stored
"""Where rows are read."""


class Bulk:
    """Gather on CPU threads, one copy, scatter."""

    def __init__(self) -> None:
        self._bulk = BulkCopy()

    def copy(self, source: Source, slab: Slab, fetch: Tensor, slots: Tensor) -> None:
        """Copy row fetch[b, h, m] of a source into pool slot slots[b, h, m]; both [B, H, M] int32 on the CPU, -1 skips."""
        self._bulk.copy(source.gather, source.format, slab, fetch, slots, pinned=source.pinned)


class Pieces:
    """One copy for each run of rows that are adjacent on the host, then a scatter (PRKV, figure 22, left)."""

    def copy(self, source: Source, slab: Slab, fetch: Tensor, slots: Tensor) -> None:
        """Copy as Bulk does."""
        which = (fetch.reshape(-1) >= 0).nonzero()[:, 0]
        shape = len(which), *source.format.tail
        rows = torch.empty(shape, dtype=source.format.stored, device=slab.data.device)
        done = 0
        for seq, head, row, count in _runs(fetch):
            stop = row + count
            while row < stop:
                piece = source.piece(seq, head, row, stop - row)
                rows[done : done + len(piece)].copy_(piece, non_blocking=True)
                done, row = done + len(piece), row + len(piece)
        if done:
            scatter(slab, source.format.decode(rows), which, slots)


def _runs(fetch: Tensor) -> Iterator[tuple[int, int, int, int]]:
    """Yield (sequence, head, first row, count) for runs of consecutive rows among rows [B, H, M]; -1 is skipped."""
    for seq, heads in enumerate(fetch.tolist()):
        for head, rows in enumerate(heads):
            known = enumerate(row for row in rows if row >= 0)
            for _, run in groupby(known, key=lambda each: each[1] - each[0]):
                (_, first), *rest = run
                yield seq, head, first, 1 + len(rest)


WAYS: dict[str, type[Bulk | Pieces]] = {"bulk": Bulk, "each": Pieces}


class PagedCopy:
    """A transfer that copies rows from the copy in page order if they are in it, else from their blocks."""

    graph_safe = False

    def __init__(self, way: Way, copies: Copies) -> None:
        self.way, self.copies = way, copies
        self._paged, self._others = WAYS[way](), WAYS[way]()

    def fetch(self, host: HostStore, slab: Slab, fetch: Tensor, slots: Tensor) -> None:
        """See `kvthaw.cache.index_api.Transfer`. For tensors on a GPU the host waits."""
        host.wait()
        fetch, slots = fetch.cpu(), slots.cpu()
        if (pages := self.copies.of(host)) is not None:
            now = pages.now()
            places = now.places(fetch)
            self._paged.copy(now, slab, places, slots)
            fetch = torch.where(places < 0, fetch, -1)
        self._others.copy(Stored(host), slab, fetch, slots)

    def __deepcopy__(self, memo: dict[int, object]) -> PagedCopy:
        return PagedCopy(self.way, self.copies)


def prkv_copies(*, transfer: Way = "bulk", layout: Layout = "page", **options: Any) -> Method:
    """Select as prkv does, and copy rows by the host.

    transfer: "bulk" gathers rows into one buffer and copies that. "each" copies each contiguous piece of host memory.
    layout: "page" keeps a copy of the rows in page order, rewritten after every refresh, as the paper does; "token" keeps none.
    Other options: prkv's.
    """
    copies, method = _copies(transfer, layout), prkv(**options)
    assert isinstance(method.index, partial)
    index = partial(PagedHybridIndex, copies=copies, **method.index.keywords) if layout == "page" else method.index
    return replace(method, index=index, transfer=partial(PagedCopy, transfer, copies))


def icecache_copies(*, transfer: Way = "bulk", layout: Layout = "page", **options: Any) -> Method:
    """Select as icecache does, and copy rows by the host, as prkv_copies does. The copy is rewritten when a sequence has grown by
    an eighth. Other options: icecache's."""
    copies, method = _copies(transfer, layout), icecache(**options)

    def paged(context: IndexContext) -> TreeIndex:
        made = method.make_index(context)
        assert isinstance(made, TreeIndex)
        return PagedTreeIndex(context, copies, config=made.config, threads=made.threads)

    index = paged if layout == "page" else method.index
    return replace(method, index=index, transfer=partial(PagedCopy, transfer, copies))


def _copies(transfer: str, layout: str) -> Copies:
    one_of(WAYS, transfer=transfer)
    one_of(("token", "page"), layout=layout)
    return Copies()
