"""IceCache (Mao et al., 2026): a DCI-tree over the keys of every KV head, whose nodes are pages of similar tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal

from kvthaw.cache.choice import Way, transfer_of
from kvthaw.cache.index_api import IndexContext, Method
from kvthaw.errors import at_least, one_of
from kvthaw.index.forest import TreeIndex
from kvthaw.index.tree_config import TreeConfig
from kvthaw.methods.options import check
from kvthaw.regions import Regions

Preset = Literal["paper", "code"]
PRESETS: dict[Preset, dict[str, Any]] = {
    "paper": {},
    "code": {
        "promote": 0.03,
        "promote_higher": 0.2,
        "promotion": "in_order",
        "simples": 1,
        "descend": "level",
        "query_beam": 30,
        "query_beam_share": 0.0015,
        "query_retrieve_share": 0.8,
        "insert_beam": 20,
        "insert_retrieve_share": 0.6,
        "build_beam": 30,
        "build_retrieve_share": 1.0,
        "retrieve_batch": 128,
    },
}

REGIONS = Regions(32, 32, 16)


def icecache(*, preset: Preset = "paper", reuse: int = 1, threads: int = 0, transfer: Way = "bulk", **tree: Any) -> Method:
    """Search a DCI-tree of each KV head on the host and fetch the pages that hold the best keys.

    The device keeps two pages of sink, two of window, one of buffer, and the pages selected. GQA: the query heads of a
    group search on their own; the union of their pages is fetched, or, where the budget holds fewer, each head's best in
    turn. With `merge=each` every head has an equal share of the budget, and the union is not cut. The paper's b rows for
    each of G heads are `merge=each:retrieved=G*b`.

    preset: "paper" promotes points at random with one ratio. It finds parents by descending to the nearest point of each
        level (algorithm 2). A query descends from the k best points of every visited node (algorithm 4), found by
        prioritized DCI. "code" follows the authors' code: it promotes every n-th point, with another ratio above level 2. A
        query descends from the best points of a level, its field of view.
    reuse: search in every reuse-th layer; the layers between reuse the pages (the paper's IceCache (reuse): 3).
    threads: search threads; 0: one per core.
    transfer: on a GPU, "bulk" gathers rows on the host into one copy, as the paper does, and no step is captured.
        "uva" lets a kernel read the rows itself. The selection is the same. Rows stay in text order on the host. The paper
        lays them in page order, which gains nothing: see docs/notes/icecache.md.

    Other options: `kvthaw.index.tree_config.TreeConfig`.
    """
    check("icecache", tree, icecache, TreeConfig)
    one_of(PRESETS, preset=preset)
    return tree_method(
        "icecache" if reuse == 1 else "icecache-reuse",
        {**PRESETS[preset], **tree},
        reuse,
        threads,
        transfer,
        differs="rows lie in token order; the union of pages is cut to the budget, "
        "which is a KV head's, not a query head's (`merge=each`: uncut); every member measured is ranked, not the k best of "
        "each node (`answers=best`: those); parents are found "
        "level by level; a layer is copied and indexed after its attention, not during it; "
        "regions shrink below 160; a new promoted key takes over "
        "nearer ones; ratio, k, page size, sink, window and P-DCI's share are kvthaw's, the paper gives none",
        choose="reproducing the paper",
    )


icecache_reuse = partial(icecache, reuse=3)


def tree_method(name: str, tree: dict[str, Any], reuse: int, threads: int, transfer: Way, **fields: Any) -> Method:
    """Return a method that searches trees of these TreeConfig fields on the host.

    fields: more of Method's.
    """
    at_least(1, reuse=reuse)
    at_least(0, threads=threads)
    config = TreeConfig(**tree)
    return Method(
        name,
        paper="IceCache",
        unit=config.unit,
        index=partial(_index, config, tree.get("seed"), threads),
        regions=REGIONS,
        transfer=transfer_of(transfer),
        anchors=reuse,
        **fields,
    )


def _index(config: TreeConfig, seed: int | None, threads: int, context: IndexContext) -> TreeIndex:
    return TreeIndex(context, replace(config, seed=context.seed if seed is None else seed), threads=threads)
