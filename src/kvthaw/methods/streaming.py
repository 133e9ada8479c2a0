"""StreamingLLM (Xiao et al., 2023): decode steps attend to the first tokens and the most recent ones alone."""

from __future__ import annotations

from kvthaw.cache.index_api import Method
from kvthaw.errors import at_least
from kvthaw.regions import Regions


def streaming(*, sink: int = 4) -> Method:
    """Sink and window fill the whole budget. Keys keep the positions that they have in the text.

    The paper gives keys positions within the cache, with which a model can continue beyond its positions; here it cannot.
    Host: rows of all other tokens lie there unread, so that a long continuation, a fork or another prompt may attend to
    them.
    """
    at_least(0, sink=sink)
    return Method(
        "streaming",
        paper="StreamingLLM",
        unit="-",
        index=None,
        regions=Regions(sink, 1, 1),
        differs="keys keep their positions in the text; the paper counts positions within the cache",
        choose="as a lower bound: sink and window alone",
    )
