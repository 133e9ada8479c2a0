"""Full attention: every layer keeps all KV on the device."""

from __future__ import annotations

from kvthaw.cache.index_api import RECENT_QUERIES, Method
from kvthaw.errors import at_least
from kvthaw.regions import Regions


def full(*, queries: int | None = RECENT_QUERIES) -> Method:
    """Dense attention, the baseline that every other method is held to. Its budget means nothing.

    queries: how many of a prompt's last queries are kept for methods that fork its cache; None: all, for h2o.
    """
    at_least(1, queries=queries)
    return Method(
        "full",
        paper="-",
        unit="-",
        index=None,
        regions=Regions(0, 1, 1),
        dense=True,
        prompt_queries=queries,
        differs="-",
        choose="contexts stay below about 30k to 50k tokens and fit the device",
    )
