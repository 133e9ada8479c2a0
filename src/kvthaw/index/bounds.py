"""Pages in text order with a bounding volume each."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from kvthaw.cache.index_api import IndexContext
from kvthaw.errors import at_least, one_of
from kvthaw.index.units import UnitIndex
from kvthaw.kernels.page_bounds import Spread
from kvthaw.kernels.unit_select import Policy


class BoundIndex(UnitIndex, tested=True):
    """Pages of `page` tokens, ranked by the largest q.k that their bounding volume allows.

    Whole pages are selected, best first. The rest of the budget is filled with the first tokens of the next page. A page
    that is not full yet has a volume around its present keys.
    """

    traits = replace(UnitIndex.traits, grows=True)
    spread: Spread

    def __init__(self, context: IndexContext, *, page: int, spread: Spread, policy: Policy = "max") -> None:
        at_least(1, page=page)
        one_of(get_args(Spread), spread=spread)
        self.spread = spread
        super().__init__(context, size=page, batch=page, width=2 * context.head_dim, policy=policy)
