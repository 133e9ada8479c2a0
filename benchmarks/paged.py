"""The physical page layout: a sequence's rows rewritten in the order of an index's units (PRKV, section 4.2 and appendix H).

A variant for `benchmarks.kernels_transfer`, for buses and copies to which order matters. The library
itself leaves rows in token order: a kernel on the device reads them wherever they lie.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, get_args

import torch
from torch import Tensor

from kvthaw.cache.host import HostStore
from kvthaw.errors import at_least, one_of
from kvthaw.native import gather_rows

Layout = Literal["HND", "NHD"]
"""What lies together: the page of one head, or all heads of one place."""


class PagedStore:
    """Rows of one sequence by place: place i of head h holds the row of token order[h, i] of the last rewriting.

    data: HND [H, P, page, 2, D], so that a head's page is one piece of 2 page D elements; NHD [P, page, 2, H, D], in pieces of D.
    Pinned where the store that it is made from is. Rewriting makes new data beside the old, which stays until place() puts the
    new in place, whole.
    """

    def __init__(self, page: int, layout: Layout = "HND") -> None:
        at_least(1, page=page)
        one_of(get_args(Layout), layout=layout)
        self.page, self.layout = page, layout
        self.data = torch.empty(0)
        self._thread: ThreadPoolExecutor | None = None
        self._coming: Future[Tensor] | None = None

    @property
    def pages(self) -> int:
        """P; places behind the last token repeat it."""
        return self.data.shape[1 if self.layout == "HND" else 0]

    def rewrite(self, store: HostStore, seq: int, order: Tensor) -> None:
        """Start to gather a sequence's rows in a new order, [H, T] int32 positions on the CPU, on a thread of this store's own; the
        rows must be in the store, and stay there. place() ends it."""
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="kvthaw-pages")
        self._coming = self._thread.submit(self._gather, store, seq, order)

    def rewriting(self) -> bool:
        """Whether rewriting is under way."""
        return self._coming is not None and not self._coming.done()

    def place(self) -> None:
        """Put the new order in place, once it is there; nothing where none was asked for."""
        if self._coming is not None:
            self.data, self._coming = self._coming.result(), None

    def rows(self, places: Tensor) -> Tensor:
        """Rows [H, n, 2, D] at places [H, n] int64."""
        heads, page = torch.arange(places.shape[0])[:, None], self.page
        if self.layout == "HND":
            return self.data[heads, places // page, places % page]
        return self.data[places // page, places % page, :, heads]

    def _gather(self, store: HostStore, seq: int, order: Tensor) -> Tensor:
        heads, tokens = order.shape
        pages = -(-tokens // self.page)
        padded = torch.cat((order, order[:, -1:].expand(-1, pages * self.page - tokens)), dim=1).contiguous()
        shape = (heads, pages, self.page, 2, store.head_dim)
        new = torch.empty(shape, dtype=store.dtype, pin_memory=store.pinned)
        gather_rows(store.table()[seq : seq + 1], store.block_size, padded[None], new.view(-1, 2, store.head_dim))
        if self.layout == "HND":
            return new
        return torch.empty((pages, self.page, 2, heads, store.head_dim), dtype=store.dtype, pin_memory=store.pinned).copy_(
            new.permute(1, 2, 3, 0, 4)
        )
