"""InfiniGen (Lee et al., 2024): tokens chosen by a few channels of the query that the layer before predicts."""

from __future__ import annotations

from functools import partial

from kvthaw.cache.index_api import Method
from kvthaw.index.skewed import SkewedIndex
from kvthaw.regions import Regions


def infinigen(*, ratio: float = 0.3, alpha: float = 5.0, most: float = 0.2, prefetch: bool = True) -> Method:
    """Tokens whose estimated logit is above the best less alpha, by 30 % of the skewed channels; at most 20 % of the sequence.

    alpha: the paper has 4 for OPT and 5 for Llama. prefetch: the query is made of the attention input of the layer before, by this
    layer's own projection; False takes the layer's own query, and so do the model's first two layers: before the first there is
    none, and what that one attends with is the token's embedding alone, which says little of the second's (so in the authors'
    code). GQA, which the paper does not have: a skew for each KV head from all its query heads, a token counts if it does for one
    of them; as in the paper all heads bring as many as they need on average. The paper has no sink and no window; here the ring is
    of 16 tokens.

    On the device: the kept channels, 0.3 D a key, the skews, the choice. On the host: rows. Skew and channels are made of the
    prompt's last 128 queries and its keys, at run time. The paper makes the skew offline and takes channels from as many queries as
    keys; here their means add up, not their sums. The prediction costs the next layer's projections once more, whole; and rows are
    fetched in the layer's own step, so the transfer is not hidden behind the layer before.
    """
    index = partial(SkewedIndex, ratio=ratio, alpha=alpha, most=most)
    regions = Regions(0, 16, 16)
    return Method(
        "infinigen",
        paper="InfiniGen",
        unit="token",
        index=index,
        regions=regions,
        any_budget=True,
        prefetches=prefetch,
        differs="keeps a window of 16 tokens; makes the skew from the prompt's last 128 queries, not offline; "
        "channels by means over these and all keys",
        choose="comparing with search by predicted queries; it has no sink (`sink=16`)",
    )
