"""PRKV: tokens that recent queries attended to stay selected; pages of all others compete, step by step."""

from __future__ import annotations

from functools import partial
from typing import Literal

from kvthaw.cache.index_api import Method
from kvthaw.errors import at_least
from kvthaw.index.hybrid import HybridIndex
from kvthaw.kernels.page_bounds import Spread
from kvthaw.kernels.unit_select import Policy
from kvthaw.regions import Regions


def prkv(
    *,
    page: int = 32,
    share: float | Literal["auto"] = 0.25,
    interval: int = 128,
    window: int = 64,
    spread: Spread = "mean",
    policy: Policy = "max",
) -> Method:
    """A static set and pages around it, both made anew every `interval` tokens.

    share: the paper's S, of the rows that the index brings; "auto" is its appendix G. interval: the paper's T, in tokens. window:
    the last tokens, always attended; the queries of at most 128 of them choose the static set. Static scores are softmax weights
    of each query head, averaged over window and group, as in the paper; policy is how the query heads of a group agree on pages,
    see `kvthaw.kernels.unit_select.Policy`. spread: of the pages' bounding volumes, as for ArkVale. The paper has no sink (the
    first tokens become static by themselves), and pages leave the window whole.

    Among random strings (needles of UUIDs) a box around 32 keys says too little of the best of them: with 1024 tokens none is
    found at 16k and 32k, where page=8 finds all and 70 %, for 86 bytes a key on the device instead of 25 and a select that reads
    four times as much.

    Host: the rows, from which a refresh reads the keys. Device: the map of tokens, each page's box, the window's queries, every
    decision.
    """
    at_least(1, page=page, window=window)
    index = partial(HybridIndex, page=page, share=share, interval=interval, spread=spread, policy=policy)
    return Method(
        "prkv",
        paper="PRKV",
        unit="token + page",
        index=index,
        regions=Regions(0, window, page),
        differs="maps tokens to pages and moves no rows; a kernel reads them, no batched copy; the budget includes the window",
        choose="long outputs whose attention keeps to a part of the context",
    )
