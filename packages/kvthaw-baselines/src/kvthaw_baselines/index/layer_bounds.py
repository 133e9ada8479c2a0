"""Pages in text order with a bounding volume each, chosen for a whole layer: ArkVale."""

from __future__ import annotations

from functools import partial

from kvthaw.cache.index_api import IndexContext
from kvthaw.errors import one_of
from kvthaw.index.bounds import BoundIndex
from kvthaw.kernels.page_bounds import Spread
from kvthaw.kernels.unit_select import Policy
from kvthaw_baselines.kernels.layer_select import layer_select


class LayerBoundIndex(BoundIndex, tested=True):
    """BoundIndex whose KV heads all select the same pages: the best for all query heads of the layer together, by `policy`."""

    def __init__(self, context: IndexContext, *, page: int, spread: Spread, policy: Policy = "max") -> None:
        one_of(("max", "mean"), policy=policy)
        super().__init__(context, page=page, spread=spread, policy=policy)
        self.choice = partial(layer_select, gather=partial(context.ranks.gather, dim=2))
