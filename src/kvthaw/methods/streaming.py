"""StreamingLLM (Xiao et al., 2023): the first tokens and the most recent ones; all others are evicted."""

from __future__ import annotations

from kvthaw.cache.index_api import Method
from kvthaw.errors import at_least
from kvthaw.regions import Regions


def streaming(*, sink: int = 4) -> Method:
    """Sink and window fill the whole budget. Keys keep the positions they were cached with."""
    at_least(0, sink=sink)
    return Method(
        "streaming",
        paper="StreamingLLM",
        unit="-",
        index=None,
        regions=Regions(sink, 1, 1),
        evicts=True,
        differs="-",
        choose="as a lower bound: sink and window alone",
    )
