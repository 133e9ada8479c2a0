"""MagicPIG (Chen et al., 2024): attention estimated from tokens that a locality-sensitive hash draws."""

from __future__ import annotations

from functools import partial

from kvthaw.cache.index_api import Method
from kvthaw.regions import Regions
from kvthaw_baselines.index.lsh import HashIndex


def magicpig(*, bits: int = 10, tables: int = 150) -> Method:
    """Select tokens that meet the query in two of L = 150 tables of K = 10 bits, weighted by the inverse of their probability.

    GQA: every query head draws and weighs its own tokens. A KV head's rows are the union over its query heads. The number
    drawn varies, and the paper has no budget: here a draw above the budget is thinned at random. A fraction such as
    `budget=0.5` has room for the whole draw; `attended` tells the number of rows. Generated keys are hashed as the prompt's
    are.

    Host: the rows. Device: every decision, from 2 L bytes of codes and the key itself. The paper has tables, keys and this
    part of the attention on the CPU, where they take no device memory.
    """
    return Method(
        "magicpig",
        paper="MagicPIG",
        unit="token",
        index=partial(HashIndex, bits=bits, tables=tables),
        regions=Regions(4, 64, 16),
        differs="hashes and attends on the device, not on the CPU; a budget below what it draws thins that (`budget=0.5` does not)",
        choose="comparing with sampling by LSH",
    )
