"""IceCache (Mao et al., 2026): a DCI-tree over the keys of every KV head, whose nodes are pages of tokens alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from kvthaw.cache.index_api import IndexContext, Method, Transfer
from kvthaw.cache.transfer import BulkCopy, UvaGather
from kvthaw.errors import ConfigError, at_least, one_of
from kvthaw.index.forest import TreeIndex
from kvthaw.index.nodes import NodeConfig, NodeIndex
from kvthaw.index.tree_config import TreeConfig
from kvthaw.methods.options import check
from kvthaw.regions import Regions

_PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {"descend": "point", "query_beam": 64, "query_beam_share": 0.02},
    "code": {
        "descend": "point",
        "promote": 0.03,
        "merge": "interleave",
        "query_beam": 30,
        "query_beam_share": 0.0015,
        "query_retrieve_share": 0.8,
        "insert_retrieve_share": 0.6,
    },
}

_REGIONS = Regions(32, 32, 16)

_TRANSFERS: dict[str, Callable[[], Transfer]] = {"uva": UvaGather, "bulk": BulkCopy}


def icecache(
    *,
    search: Literal["host", "device"] = "host",
    preset: str = "default",
    reuse: int = 1,
    prefetch: bool = False,
    threads: int = 0,
    transfer: str = "uva",
    **tree: Any,
) -> Method:
    """Two pages of sink, two of window, one of buffer; what a tree search found.

    search: where. "host": trees in C++ beside the rows; whole pages of the tokens that were found. The device keeps sink, window
    and the rows selected, nothing else, and a captured step is a graph for each search and one more. GQA: the query heads of a
    group search on their own and share the budget as `merge` says. Other options are TreeConfig's fields. "device": the tree's
    lowest level there, see `kvthaw.index.nodes.NodeIndex`; single tokens, in a step that asks the host nothing. GQA: `policy`.
    Other options are NodeConfig's fields.

    reuse: every `reuse`-th layer searches; those between take its choice (the paper's IceCache (reuse) has 3). transfer, on a GPU:
    "bulk" as the paper has it, or "uva", where a kernel reads the rows itself. Of the host's search alone: prefetch (search while
    the layer before attends, with the query that its attention input makes, instead of waiting for the layer's own), preset
    ("default" descends by the nodes' digests, "paper" by their points, algorithm 4, in a field of view wide enough to find as much,
    "code" does as the authors' code) and threads, of the trees, 0 for one a core. With "bulk" or prefetch no step is captured.
    """
    at_least(1, reuse=reuse)
    at_least(0, threads=threads)
    check("icecache", tree, icecache, NodeConfig if search == "device" else TreeConfig)
    one_of(("host", "device"), search=search)
    one_of(_PRESETS, preset=preset)
    one_of(_TRANSFERS, transfer=transfer)
    if search == "device":
        if preset != "default" or threads or prefetch:
            raise ConfigError("prefetch, preset and threads are of the search on the host; leave them out with search='device'")
        return Method(
            "icecache-device" if reuse == 1 else "icecache-device-reuse",
            paper="IceCache",
            unit="token",
            index=partial(NodeIndex, config=NodeConfig(**tree)),
            regions=_REGIONS,
            transfer=_TRANSFERS[transfer],
            anchors=reuse,
        )
    config = TreeConfig(**{**_PRESETS[preset], **tree})  # refuses bad options now
    return Method(
        "icecache" if reuse == 1 else "icecache-reuse",
        paper="IceCache",
        unit="page",
        index=partial(_index, config, tree.get("seed"), threads),
        regions=_REGIONS,
        transfer=_TRANSFERS[transfer],
        anchors=reuse,
        prefetches=prefetch,
    )


def _index(config: TreeConfig, seed: int | None, threads: int, context: IndexContext) -> TreeIndex:
    return TreeIndex(context, replace(config, seed=context.seed if seed is None else seed), threads=threads)
