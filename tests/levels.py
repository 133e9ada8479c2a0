"""Levels of a DCI-tree's points, as native/tree.cpp draws them."""

from __future__ import annotations

import math

from kvthaw.index.tree_config import TreeConfig, splitmix64


def draw_level(config: TreeConfig, layer: int, head: int, position: int) -> int:
    """The level of a position, from 1: a pure function, so that a sequence alone equals the sequence in a batch. At most 32."""
    first, higher = config.ratios
    level = 1
    if config.promotion == "in_order":
        count, every = position + 1, math.ceil(1 / first)
        while count % every == 0 and level < 32:
            level, count, every = level + 1, count // every, math.ceil(1 / higher)
        return level
    x = splitmix64(splitmix64(splitmix64(splitmix64(config.seed) ^ layer) ^ head) ^ position)
    uniform = (x >> 11) * 2.0**-53
    threshold = first
    while uniform < threshold and level < 32:
        level, threshold = level + 1, threshold * higher
    return level
