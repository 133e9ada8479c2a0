"""OmniKV (Hao et al., 2025): a few filter layers attend to everything; the layers after one attend to what it found."""

from __future__ import annotations

from functools import partial

from kvthaw.cache.index_api import Method
from kvthaw.regions import Regions
from kvthaw_baselines.index.filters import FilterIndex


def omnikv(*, filters: tuple[int, ...] | None = None, dense: bool = True) -> Method:
    """Filter layers 2, 8 and 18 of 32, and those at the same depths of other models; or `filters`, by number. The first layer that
    is not dense is always one.

    GQA: one choice for all heads of a layer, by the largest softmax weight of any query head.
    dense: filter layers attend to all tokens, as in the paper, which the budget does not bound, as it does not bound dense
        layers; else to what they choose. The window is kvthaw's: the authors choose among the prompt's tokens and keep all
        that are generated. Host: the rows. Device: keys and values of the filter layers (keys alone where they are not
        dense), every decision.
    """
    anchors = (2 / 32, 8 / 32, 18 / 32) if filters is None else filters
    return Method(
        "omnikv",
        paper="OmniKV",
        unit="token",
        index=partial(FilterIndex, dense=dense),
        regions=Regions(4, 32, 16),
        anchors=anchors,
        differs="keeps a window of the generated tokens, not all; the first layer that is not dense is always a filter",
        choose="comparing with reuse of tokens across layers",
    )
