"""ArkVale (Chen et al., 2024): pages of 32 by a bounding volume, recalled from the host; the lowest-scored leave the device."""

from __future__ import annotations

from functools import partial

from kvthaw.cache.index_api import Method
from kvthaw.errors import at_least
from kvthaw.index.bounds import BoundIndex
from kvthaw.kernels.page_bounds import Spread
from kvthaw.kernels.unit_select import Policy
from kvthaw.regions import Regions


def arkvale(*, page: int = 32, spread: Spread = "mean", policy: Policy = "max", keep: int = 1) -> Method:
    """The pages of the best bounds, from a box of half extent mean |c - k| around each page's centre.

    spread: "max" makes it a true upper bound. policy: how the query heads of a group agree, see
    `kvthaw.kernels.unit_select.Policy`. The first page and the last two stay on the device. keep: of how many steps the selected
    rows stay there too; with 1, what leaves is what this step scored too low to select: ArkVale's rule, at the smallest cache it
    works with. Host: the rows. Device: each page's box, every decision.
    """
    at_least(1, page=page)
    index = partial(BoundIndex, page=page, spread=spread, policy=policy)
    regions = Regions(page, 2 * page, page)
    return Method(
        "arkvale",
        paper="ArkVale",
        unit="page",
        index=index,
        regions=regions,
        keep=keep,
        any_budget=True,
        differs="one choice a KV head, the authors' one a layer; keeps one step's rows on the device",
        choose="comparing with pages by bounding volume",
    )
