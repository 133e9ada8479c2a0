"""MagicPIG (Chen et al., 2024): attention estimated from tokens that a locality-sensitive hash draws."""

from __future__ import annotations

from functools import partial

from kvthaw.cache.index_api import Method
from kvthaw.index.lsh import HashIndex
from kvthaw.regions import Regions


def magicpig(*, bits: int = 10, tables: int = 150) -> Method:
    """Tokens that meet the query in two of L = 150 tables of K = 10 bits, weighed by 1 / their chance to.

    GQA: every query head draws on its own and weighs what it drew; a KV head's rows are what its query heads drew together. The
    number drawn is not fixed, and the paper has no budget: what one cannot hold is thinned at random. A fraction such as
    `budget=0.5` has room for the method's own draw; `attended` says how many rows that was. Generated keys are hashed as the
    prompt's are. Host: the rows. Device: every decision, from 2 L bytes of codes and the key itself (the paper has tables, keys and
    this part of the attention on the CPU, where they take no device memory).
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
