"""kvthaw's own: the best rows by codes, and everything else estimated from the means of its pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from kvthaw.cache.index_api import Method
from kvthaw.errors import at_least
from kvthaw.index.codes import Policy
from kvthaw.methods.pariskv_plus import pariskv_plus
from kvthaw.methods.remainder import with_remainder
from kvthaw.regions import Regions


def thaw(
    *,
    remainder: int = 64,
    policy: Policy = "max",
    beta: float | None = None,
    candidates: int | None = None,
    code_bits: Literal[3, 4] = 3,
    tolerance: float = 0.0003,
) -> Method:
    """Attend exactly to the rows that weigh most, and to every page's other tokens by their mean key and mean value.

    Tokens whose scores the codes estimate weigh by these instead of their page's mean key. Exact top-k is no longer the ceiling:
    attention has a long tail, which the estimate weighs. At 256 tokens the divergence from full attention is 0.23 to 0.32 of
    exact top-k's on three pretrained models. We measured it with prompts by which no setting was chosen. See
    docs/notes/remainder.md.

    remainder: tokens of a page, a multiple of 16. The means take 0.52 / remainder of the KV's bytes on a GPU, where they are e4m3.
    tolerance: a step reads no row whose estimated share of a head's attention is less, and estimates it like the rest. `budget`
        is the most that a head may read; few heads, layers and steps need that. 0: a step reads as many as the budget allows.
    policy: how the query heads of a group agree on rows. Each of them weighs the remainder by its own query.

    The other options are pariskv-plus's. Sink and window are small, since the estimate covers what a long window is for. One
    layer is dense in deep models, since the first one's attention is flat.

    Host: the rows. Device: each key's codes (80 bytes for 128 dimensions) and each page's means; every decision. Not for models
    with a softcap on attention logits.
    """
    at_least(1, remainder=remainder)
    codes = pariskv_plus(
        policy=policy,
        beta=beta,
        candidates=candidates,
        code_bits=code_bits,
        tolerance=tolerance,
    )
    made = with_remainder(codes, remainder)
    return replace(
        made,
        name="thaw",
        paper="-",
        regions=Regions(4, 32, 16),
        dense_layers=1,
        differs="-",
        choose="the closest to full attention at every budget",
    )
