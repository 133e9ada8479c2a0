"""IceCache's tree with another search: a query descends by digests of a node's keys instead of its point."""

from __future__ import annotations

from typing import Any

from kvthaw.cache.choice import Way
from kvthaw.cache.index_api import Method
from kvthaw.index.tree_config import TreeConfig
from kvthaw.methods.icecache import tree_method
from kvthaw.methods.options import check

SETTINGS: dict[str, Any] = {
    "promote_higher": 0.2,
    "simples": 1,
    "descend": "digest",
    "query_beam": 64,
    "query_beam_share": 0.001,
    "query_retrieve_share": 1.0,
    "insert_beam": 20,
    "insert_retrieve_share": 1.0,
    "build_beam": 0,
    "unit": "token",
    "merge": "share",
}


def icecache_digest(*, reuse: int = 1, prefetch: bool = False, threads: int = 0, transfer: Way = "uva", **tree: Any) -> Method:
    """Search icecache's trees on the host by node digests instead of node keys.

    A digest is the mean, the spread and the outliers, in 8 bits, of all keys below a node. A query descends to the nodes
    that may hold the best key, so it finds a key unlike the rest of its node. Single tokens are fetched: the best of all
    members of the visited nodes. `unit=page` fetches their whole pages, in which few tokens matter for real keys. The
    device holds what it holds under icecache. Parents are exact, P-DCI gives every member a true distance, and GQA is by
    the largest share in any head's attention.

    A captured step has one more graph than searches. With another transfer than "uva", or with prefetch, no step is
    captured.

    prefetch: search while the layer before attends, with the query that follows from that layer's attention input.
    reuse, threads, transfer: as in icecache, but "uva" by default.

    Other options: `kvthaw.index.tree_config.TreeConfig`.
    """
    check("icecache-digest", tree, icecache_digest, TreeConfig)
    name = "icecache-digest" if reuse == 1 else f"icecache-digest:reuse={reuse}"
    return tree_method(
        name,
        {**SETTINGS, **tree},
        reuse,
        threads,
        transfer,
        prefetches=prefetch,
        differs="descends by node digests, not keys; single tokens, not pages (`unit=page`); exact parents; no pruning by P-DCI",
        choose="device memory is all that matters and the host has cores to spare",
    )
