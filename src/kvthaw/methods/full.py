"""Full attention: every layer keeps all KV on the device."""

from __future__ import annotations

from kvthaw.cache.index_api import Method
from kvthaw.regions import Regions


def full() -> Method:
    """Dense attention, the baseline that every other method is held to. Its budget means nothing."""
    return Method(
        "full",
        paper="-",
        unit="-",
        index=None,
        regions=Regions(0, 1, 1),
        dense=True,
        differs="-",
        choose="contexts stay below some 50k tokens and fit the device",
    )
