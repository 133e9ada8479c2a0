"""PRKV's static tokens and pages, with smaller pages that keep the keys of their static tokens."""

from __future__ import annotations

from functools import partial

from kvthaw.cache.index_api import Method
from kvthaw.errors import at_least
from kvthaw.kernels.page_bounds import Spread
from kvthaw.kernels.unit_select import Policy
from kvthaw.regions import Regions
from kvthaw_baselines.index.static_pages import StaticPageIndex


def prkv_plus(
    *,
    page: int = 16,
    share: float = 0.25,
    interval: int = 128,
    observe: int = 8,
    spread: Spread = "mean",
    policy: Policy = "max",
) -> Method:
    """Keep the tokens that the last few queries attended to most selected; smaller pages compete, ranked with all their keys.

    Three changes to prkv find lines among their like, which pages of 32 lose.
    page: 16 tokens; with 8 some random strings are found too, for 86 bytes a key on the device instead of 45.
    observe: the last 8 queries choose the static set, because queries of a question's template would spend it elsewhere. At
        most 64 queries per KV head count. A static token leaves its page, so that no row is selected twice. It stays in the
        page's bounding volume, so the rest of its line still ranks by its best key.

    A fourth makes the times of steps equal: a refresh (every `interval` tokens) reads the keys of the pages that rank best
    for these queries, some thousand a head, not all keys.

    Host: the rows, from which a refresh reads those keys. Device: as for prkv. Other options, and how the query heads of a group
    agree on pages: as in prkv.
    """
    at_least(1, page=page, observe=observe)
    index = partial(StaticPageIndex, page=page, share=share, interval=interval, spread=spread, policy=policy, observe=observe)
    return Method(
        "prkv-plus",
        paper="PRKV",
        unit="token + page",
        index=index,
        regions=Regions(0, 64, page),
        differs="pages of 16, not 32; the last 8 queries choose the static set, not 64, later from the best pages' keys; "
        "static tokens stay in their pages' volumes; two dense layers",
        choose="as prkv, and lines must be found among their like",
    )
