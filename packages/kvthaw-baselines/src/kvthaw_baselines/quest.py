"""Quest (Tang et al., 2024): pages of 16 by the largest q.k within their channels' minimum and maximum."""

from __future__ import annotations

from functools import partial

from kvthaw.cache.index_api import Method
from kvthaw.errors import at_least
from kvthaw.index.bounds import BoundIndex
from kvthaw.kernels.unit_select import Policy
from kvthaw.regions import Regions


def quest(*, page: int = 16, policy: Policy = "max") -> Method:
    """The pages of the best upper bounds. Quest keeps all KV on the device; here its pages are offloaded as all methods' are.

    policy: how the query heads of a group agree, see `kvthaw.kernels.unit_select.Policy`. Quest has no sink and attends to
    the page it is filling: the window and the buffer are a page each. Its rule of max(3, budget / 16) pages follows from the
    budget, which includes them. Host: the rows. Device: each page's minima and maxima, every decision.
    """
    at_least(1, page=page)
    index = partial(BoundIndex, page=page, spread="max", policy=policy)
    return Method(
        "quest",
        paper="Quest",
        unit="page",
        index=index,
        regions=Regions(0, page, page),
        any_budget=True,
        differs="offloads its pages, which Quest keeps on the device; one choice a KV head, by the largest share "
        "in any head's softmax over pages; `page=32` is how PRKV's paper runs it",
        choose="comparing with pages by channel bounds; it has no sink, and "
        "on real keys `sink=16` covers 4 to 14 points more at 64 tokens",
    )
