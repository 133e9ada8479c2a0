"""Chance without state: integers that look random and depend on what they are made of alone."""

from __future__ import annotations

from torch import Tensor

GOLDEN, SPREAD, _LAST = -7046029254386353131, -4658895280553007687, -7723592293110705685  # splitmix64's, as signed integers


def mix(x: Tensor) -> Tensor:
    """int64 -> int64, one to one; every bit depends on every bit of x (the finish of splitmix64)."""
    for shift, factor in ((30, SPREAD), (27, _LAST)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x ^ ((x >> 31) & ((1 << 33) - 1))
