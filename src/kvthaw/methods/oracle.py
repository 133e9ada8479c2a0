"""Exact top-k: what a perfect index would choose. The bound of every method, at the price of keeping all keys on the device."""

from __future__ import annotations

from functools import partial

from kvthaw.cache.index_api import Method
from kvthaw.index.exact import ExactIndex
from kvthaw.index.tokens import Policy
from kvthaw.regions import Regions


def oracle(*, policy: Policy = "max") -> Method:
    """The rows of the largest attention weights.

    policy: how the query heads of a group agree, see ExactIndex. Host: the rows. Device: all keys once more, every
        decision.
    """
    return Method(
        "oracle",
        paper="-",
        unit="token",
        index=partial(ExactIndex, policy=policy),
        regions=Regions(4, 32, 16),
        differs="-",
        choose="as a bound: what exact top-k would reach",
    )
