"""H2O (Zhang et al., 2023): half of the budget for recent tokens, half for those that were attended to most."""

from __future__ import annotations

from functools import partial

from kvthaw.cache.index_api import Method
from kvthaw.index.heavy import HeavyIndex
from kvthaw.index.kept import Agree
from kvthaw.regions import Regions


def h2o(*, agree: Agree = "mean") -> Method:
    """Heavy hitters by accumulated softmax weight; when tokens leave the ring, those of least weight are evicted.

    agree: how the query heads of a group agree, "mean" or "max" of their weights. The paper adds up the attention of every query of
    the prompt; here a prompt counts with its last 64 queries, which is what is known of one that came in chunks or was prefilled
    for several methods. Host: rows that were evicted lie there unread, so that a long continuation, which is a new prompt, may
    choose from them. Device: for each row that is kept its score, its key once more, and the row.
    """
    return Method(
        "h2o",
        paper="H2O",
        unit="token",
        index=partial(HeavyIndex, agree=agree),
        regions=Regions(0, 32, 16),
        differs="scores a prompt by its last 64 queries, not by all",
        choose="comparing with eviction by accumulated attention",
    )
