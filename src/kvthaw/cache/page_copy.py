"""A second copy of a layer's rows, in the order of an index's pages (PRKV, section 4.2 and appendix H)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch
from torch import Tensor

from kvthaw.cache.host_memory import host_tensor
from kvthaw.kernels.row_format import RowFormat
from kvthaw.native import gather_rows


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
