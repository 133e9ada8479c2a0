"""Pages in text order with a bounding volume each: Quest and ArkVale."""

from __future__ import annotations

from typing import get_args

from torch import Tensor

from kvthaw.errors import ConfigError
from kvthaw.index.units import UnitIndex
from kvthaw.kernels.page_bounds import Spread, page_bounds
from kvthaw.kernels.unit_select import Policy
from kvthaw.types import LayerShape


class BoundIndex(UnitIndex):
    """Pages of `page` tokens, ranked by the largest q.k that their bounding volume allows.

    Whole pages are taken, best first; what the budget leaves is filled with the first tokens of the next page. A page that is
    not full yet has a volume around the keys it has.
    """

    grows = True

    def __init__(self, shape: LayerShape, *, page: int, spread: Spread, policy: Policy = "max") -> None:
        if page < 1:
            raise ConfigError(f"page is {page}; it must be at least 1")
        if spread not in get_args(Spread):
            raise ConfigError(f"spread is {spread!r}; it must be one of {', '.join(get_args(Spread))}")
        self.spread: Spread = spread
        super().__init__(shape, size=page, batch=page, width=2 * shape.head_dim, policy=policy)

    def digest(self, keys: Tensor) -> Tensor:
        """See UnitIndex."""
        return page_bounds(keys, self.size, spread=self.spread)
