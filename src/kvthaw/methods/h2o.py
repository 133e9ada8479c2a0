"""H2O (Zhang et al., 2023): half of the budget for recent tokens, half for those that were attended to most."""

from __future__ import annotations

from functools import partial

from kvthaw.cache.index_api import Method
from kvthaw.errors import at_least
from kvthaw.index.heavy import HeavyIndex, Score
from kvthaw.index.kept import Agree
from kvthaw.regions import Regions


def h2o(*, agree: Agree = "mean", score: Score = "sum", queries: int | None = None) -> Method:
    """Heavy hitters by accumulated softmax weight; when tokens leave the ring, those of least weight are evicted.

    agree: how the query heads of a group agree, "mean" or "max" of their weights. score: "sum" of the weights that a token was
    paid, as in the paper, or their "mean" over the queries that could see it, as in kvpress, which favours no earlier token.
    queries: how many of a prompt's last queries count; None: all, which costs as much as the prompt's attention once more, and
    their memory on the device until decoding begins. A fork needs them of the cache that it is forked from: full:queries=None.

    Host: rows that were evicted lie there unread, so that a long continuation, which is a new prompt, may choose from them, by its
    own queries. Device: for each row that is kept its score, its key once more, and the row.
    """
    at_least(1, queries=queries)
    return Method(
        "h2o",
        paper="H2O",
        unit="token",
        index=partial(HeavyIndex, agree=agree, score=score, queries=queries),
        regions=Regions(0, 32, 16),
        prompt_queries=queries,
        differs="one choice a KV head, the paper's one a query head; evicts by 16 tokens, as they leave the ring, not step by step",
        choose="comparing with eviction by accumulated attention",
    )
