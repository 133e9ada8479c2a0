"""PRKV: tokens that recent queries attended to stay selected; pages of all others compete, step by step."""

from __future__ import annotations

from functools import partial
from typing import Literal

from kvthaw.cache.choice import Way, transfer_of
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
    spread: Spread = "mean",
    policy: Policy = "max",
    transfer: Way = "uva",
) -> Method:
    """Keep the tokens that recent queries attended to most selected; pages of all others compete, step by step (algorithm 1).

    share: the paper's S, the static share of the rows from the index; "auto" is its appendix G.
    interval: the paper's T. Every `interval` tokens static set and pages are recomputed, concurrently with the steps. They
        apply when the next page of tokens leaves the window.
    policy: how the query heads of a group agree on pages, see `kvthaw.kernels.unit_select.Policy`.
    spread: of the pages' bounding volumes, as for ArkVale.

    The window holds the last tokens, which are always attended. The queries of at most 128 of them choose the static set,
    by the softmax weights of each query head, averaged over window and group. The paper has no sink (the first tokens
    become static by themselves), and whole pages leave the window. Its budget k is the number of rows from the index,
    `retrieved=k`.

    transfer: on a GPU, "uva" lets a kernel read the rows. "bulk" gathers them into one pinned buffer and copies that, as
        the paper does (batched KV transfer); then no step is captured. The selection is the same. Rows stay in text order on
        the host. The paper rewrites them in page order, which gains nothing: see docs/notes/transfer.md.

    Host: the rows, from which a refresh reads the keys. Device: the map of tokens, each page's box, the window's queries, every
    decision.
    """
    at_least(1, page=page)
    index = partial(HybridIndex, page=page, share=share, interval=interval, spread=spread, policy=policy)
    return Method(
        "prkv",
        paper="PRKV",
        unit="token + page",
        index=index,
        regions=Regions(0, 64, page),
        transfer=transfer_of(transfer),
        dense_layers=0,
        differs="maps tokens to pages and moves no rows; a kernel reads rows (`transfer=bulk`: one "
        "copy); the budget includes the window; a refresh is begun in one append and in force with the next page",
        choose="reproducing the paper; long outputs whose attention keeps to a part of the context; it has no sink, "
        "and chat prompts of real models need `sink=16`",
    )
