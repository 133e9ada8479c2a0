"""PQCache (Zhang et al., 2024): product quantisation of the prompt's keys, and top-k by the estimated products."""

from __future__ import annotations

from functools import partial

from kvthaw.cache.index_api import Method
from kvthaw.index.tokens import Policy
from kvthaw.regions import Regions
from kvthaw_baselines.index.pq import ProductIndex


def pqcache(*, parts: int = 2, centroids: int = 64, iterations: int = 20, policy: Policy = "max", keep: int = 1) -> Method:
    """The tokens of the largest estimated attention weights; 2 sub-vectors and 64 centroids, as in the paper.

    policy: how the query heads of a group agree, see `kvthaw.index.tokens.Policy`. Generated tokens get the prompt's
        centroids, which stay as they are.
    keep: of how many steps the selected rows stay on the device; those wanted longest ago go first, where the paper's block
        cache drops what is used least often. The paper keeps initial and recent tokens too, here sink and window. Host: the
        rows. Device: a byte a key and part, the centroids, every decision (the paper clusters on CPU threads).
    """
    index = partial(ProductIndex, parts=parts, centroids=centroids, iterations=iterations, policy=policy)
    return Method(
        "pqcache",
        paper="PQCache",
        unit="token",
        index=index,
        regions=Regions(4, 32, 16),
        keep=keep,
        any_budget=True,
        differs="clusters on the device, not on the CPU; drops rows by last use, not by frequency",
        choose="comparing with product quantisation",
    )
