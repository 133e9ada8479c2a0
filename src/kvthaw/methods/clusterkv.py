"""ClusterKV (Liu et al., 2024): semantic clusters of keys, taken whole in the order of q.mu."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, get_args

from kvthaw.cache.index_api import Method
from kvthaw.errors import one_of
from kvthaw.index.clusters import ClusterIndex, Start
from kvthaw.kernels.kmeans import Distance
from kvthaw.kernels.unit_select import Policy
from kvthaw.regions import Regions

Preset = Literal["default", "paper", "code"]

_PAPER: dict[str, Any] = {"tokens_per_cluster": 80, "clusters_per_batch": 4, "start": "random", "iterations": 20}
_PRESETS: dict[str, dict[str, Any]] = {
    "default": {"tokens_per_cluster": 32, "clusters_per_batch": 10, "start": "covering", "iterations": 8},
    "paper": _PAPER,
    "code": {**_PAPER, "clusters_per_batch": 8},
}


def clusterkv(
    *,
    preset: Preset = "default",
    policy: Policy = "max",
    distance: Distance = "cosine",
    tokens_per_cluster: int | None = None,
    clusters: int | None = None,
    batch: int = 320,
    clusters_per_batch: int | None = None,
    start: Start | None = None,
    iterations: int | None = None,
    keep: int = 1,
) -> Method:
    """Clusters of the prompt's keys and, every `batch` tokens, of those that came since.

    preset: what of the following is not given. "paper": 80 tokens a cluster, 4 clusters of 320 later tokens, first centroids drawn
    among the keys, at most 20 iterations of k-means; "code", the authors', has 8 clusters of later tokens. With these, random
    strings are lost where many compete: 256 tokens are two or three clusters, and every tenth time the one that is needed is the
    fifth by q.mu or later; and the few keys of a needle are often in a cluster of others. "default": 32 tokens a cluster, so that
    the same budget holds more of them, for 5 bytes more a key (head_dim 128, bf16); half of the first centroids drawn, the other
    half the keys that those cover worst (`kvthaw.index.clusters.covering`), from where 8 iterations find as much as 20.

    policy: how the query heads of a group agree, see `kvthaw.kernels.unit_select.Policy`. distance: what k-means compares by.
    clusters: as many for any prompt (the paper's C0), instead of one for every tokens_per_cluster. keep: the paper's R, of how many
    steps the selected rows stay on the device. The paper keeps 16 sink tokens; it states no window, so tokens leave by 16.

    Host: the rows. Device: the centroids, the map of tokens and clusters, k-means, every decision.
    """
    one_of(get_args(Preset), preset=preset)
    given = {
        "tokens_per_cluster": tokens_per_cluster,
        "clusters_per_batch": clusters_per_batch,
        "start": start,
        "iterations": iterations,
    }
    chosen = _PRESETS[preset] | {name: value for name, value in given.items() if value is not None}
    index = partial(ClusterIndex, policy=policy, distance=distance, clusters=clusters, batch=batch, **chosen)
    regions = Regions(16, 16, 16)
    return Method(
        "clusterkv",
        paper="ClusterKV",
        unit="cluster",
        index=index,
        regions=regions,
        keep=keep,
        any_budget=True,
        differs="by default 32 tokens a cluster, not 80, and covering starts (`preset=paper`: neither); "
        "a window of 16, not 320; one choice a KV head",
        choose="the least device memory among fast methods, with some 1,000 tokens",
    )
