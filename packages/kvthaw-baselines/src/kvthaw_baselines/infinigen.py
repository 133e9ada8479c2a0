"""InfiniGen (Lee et al., 2024): tokens chosen by a few channels of the query that the layer before predicts."""

from __future__ import annotations

from functools import partial

from kvthaw.cache.index_api import Method
from kvthaw.regions import Regions
from kvthaw_baselines.index.skewed import SkewedIndex


def infinigen(*, ratio: float = 0.3, alpha: float = 5.0, most: float = 0.2, prefetch: bool = True) -> Method:
    """Select tokens whose logit, estimated from 30 % of the skewed channels, is within alpha of the best; at most 20 % of the
    sequence.

    alpha: the paper has 4 for OPT and 5 for Llama.
    prefetch: predict the query from the attention input of the layer before, with this layer's projection. False: use the
        layer's own query. The model's first two layers always do, as in the authors' code. The first has no layer before
        it, and the input of the first is only the token's embedding, which predicts the second's query badly.

    GQA, which the paper does not have: each KV head has a skew from all its query heads. A token counts if it counts for
    one of them. As in the paper, all heads select the average number of counting tokens. The paper has no sink and no
    window; here the ring has 16 tokens.

    On the device: the kept channels, 0.3 D per key, the skews, the choice. On the host: rows. Skew and channels follow from
    the prompt's last 128 queries and its keys, at run time. The paper computes the skew offline, and chooses channels from
    equally many queries and keys. Here the means of both are added, not the sums. The prediction costs the next layer's
    projections once more. Rows are fetched in the layer's own step, so the layer before does not hide the transfer.
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
