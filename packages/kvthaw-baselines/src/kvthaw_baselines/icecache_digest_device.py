"""IceCache's tree searched on the device: digests of flat nodes, without levels above them."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvthaw.cache.choice import Way, transfer_of
from kvthaw.cache.index_api import Method
from kvthaw.errors import at_least
from kvthaw.methods.icecache import REGIONS
from kvthaw.methods.options import check
from kvthaw_baselines.index.nodes import NodeConfig, NodeIndex


def icecache_digest_device(*, reuse: int = 1, transfer: Way = "uva", **nodes: Any) -> Method:
    """Search digests of flat nodes on the device and fetch single tokens; a step asks the host nothing.

    `thaw` replaced it: with 256 rows it is faster and nearer to full attention. It keeps 20 to 23 % of full attention's KV
    on the device then, this method 18 to 19 %.

    Keys are grouped by their nearest promoted key, on one level, when they leave the window; there are no pages, and
    earlier nodes take no later keys. GQA: `policy`.
    reuse, transfer: as in icecache-digest. Other options: `kvthaw_baselines.index.nodes.NodeConfig`.
    """
    check("icecache-digest-device", nodes, icecache_digest_device, NodeConfig)
    at_least(1, reuse=reuse)
    return Method(
        "icecache-digest-device" if reuse == 1 else f"icecache-digest-device:reuse={reuse}",
        paper="IceCache",
        unit="token",
        index=partial(NodeIndex, config=NodeConfig(**nodes)),
        regions=REGIONS,
        transfer=transfer_of(transfer),
        anchors=reuse,
        differs="flat nodes searched by digests on the device: single tokens, no tree, pages or insertion",
        choose="comparing with node digests on the device; `thaw` is faster and nearer to full attention",
    )
