"""H2O (Zhang et al., 2023): half of the budget for recent tokens, half for the most attended tokens."""

from __future__ import annotations

from functools import partial

from kvthaw.cache.index_api import Method
from kvthaw.errors import at_least
from kvthaw.regions import Regions
from kvthaw_baselines.index.heavy import HeavyIndex, Score
from kvthaw_baselines.index.kept import Agree


def h2o(*, agree: Agree = "mean", score: Score = "sum", queries: int | None = None) -> Method:
    """Keep heavy hitters by accumulated softmax weight. When tokens leave the ring, the tokens with the least weight are
    evicted.

    agree: how the query heads of a group agree, "mean" or "max" of their weights.
    score: "sum" of a token's weights, as in the paper, or their "mean" over the queries that could see it, as in kvpress.
        The mean does not favour earlier tokens.
    queries: how many of a prompt's last queries count. None: all, which costs the prompt's attention once more, and their
        memory on the device until decoding begins. A fork takes them from its source, which must be full:queries=None.

    Host: evicted rows, unread. A long continuation is a new prompt and may choose from them with its own queries. Device:
    each kept row, its score, and a second copy of its key.
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
