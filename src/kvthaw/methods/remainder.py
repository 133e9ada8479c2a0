"""The remainder as an option of every method that selects on the device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvthaw.cache.index_api import Method
from kvthaw.errors import ConfigError, at_least
from kvthaw.index.remainder import RemainderIndex
from kvthaw.kernels.bucket_topk import MARK


def with_remainder(method: Method, page: int) -> Method:
    """Return a method that estimates what it does not select from pages of `page` tokens; return `method` for 0.

    Raises ConfigError unless `page` is a multiple of 16. Also for a method that retrieves nothing, one whose layers follow
    another layer's choice, and for one that selects with a predicted query alone: the estimate needs each layer's own."""
    at_least(0, remainder=page)
    if page % MARK:
        raise ConfigError(f"remainder is {page}; it must be a multiple of {MARK}")
    if page == 0:
        return method
    if method.index is None:
        raise ConfigError(f"remainder is {page}; {method.name} selects no rows, so nothing is left to estimate; it must be 0")
    if method.anchors != 1 or method.prefetches:
        raise ConfigError(
            f"remainder is {page}; it must be 0 for {method.name}, whose layers attend to rows that another query chose"
        )
    return replace(method, index=partial(RemainderIndex, make=method.index, page=page))
