"""ArkVale (Chen et al., 2024): pages of 32 by a bounding volume, recalled from the host; the lowest-scored leave the device."""

from __future__ import annotations

from functools import partial
from typing import Literal

from kvthaw.cache.index_api import Method
from kvthaw.errors import at_least
from kvthaw.index.bounds import BoundIndex
from kvthaw.kernels.page_bounds import Spread
from kvthaw.kernels.unit_select import Policy
from kvthaw.regions import Regions
from kvthaw_baselines.index.layer_bounds import LayerBoundIndex

Choice = Literal["layer", "head"]


def arkvale(
    *,
    page: int = 32,
    spread: Spread = "mean",
    choice: Choice = "layer",
    policy: Policy = "max",
    sink_pages: int = 2,
    keep: int = 1,
) -> Method:
    """The pages of the best bounds, from a box of half extent mean |c - k| around each page's centre.

    spread: "max" makes it a true upper bound.
    choice: "layer" selects the same pages in all KV heads of a layer, the authors' default; "head" lets each KV head
        choose.
    policy: how the query heads of a group agree, which is the layer or a KV head's, see
        `kvthaw.kernels.unit_select.Policy`; for a layer "max" or "mean". The first `sink_pages` pages and the last two stay
        on the device.
    keep: of how many steps the selected rows stay there too; with 1, what leaves is what this step scored too low to
        select: ArkVale's rule, at the smallest cache it works with. Host: the rows. Device: each page's box, every
        decision.
    """
    at_least(1, page=page)
    at_least(0, sink_pages=sink_pages)
    made = LayerBoundIndex if choice == "layer" else BoundIndex
    return Method(
        "arkvale",
        paper="ArkVale",
        unit="page",
        index=partial(made, page=page, spread=spread, policy=policy),
        regions=Regions(sink_pages * page, 2 * page, page),
        keep=keep,
        any_budget=True,
        differs="a layer's query heads agree by their largest softmax weight; keeps one step's rows on the device; sink and window "
        "shrink below a budget of 320",
        choose="comparing with pages by bounding volume",
    )
