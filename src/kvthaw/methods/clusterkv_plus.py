"""ClusterKV with smaller clusters, another start of k-means and a short window."""

from __future__ import annotations

from kvthaw.cache.index_api import Method
from kvthaw.index.clusters import Choice, Start
from kvthaw.kernels.kmeans import Distance
from kvthaw.methods.clusterkv import cluster_method
from kvthaw.regions import Regions


def clusterkv_plus(
    *,
    policy: Choice = "max",
    distance: Distance = "cosine",
    tokens_per_cluster: int = 32,
    clusters: int | None = None,
    batch: int = 320,
    clusters_per_batch: int = 10,
    start: Start = "covering",
    iterations: int = 8,
    keep: int = 1,
) -> Method:
    """Select clusters as clusterkv does, changed to find single keys within small budgets.

    clusterkv loses random strings among many others. 256 tokens are two or three clusters, and in one of ten cases the
    needed one ranks fifth by q.mu or later. The few keys of a needle are often in a cluster of others. Here a cluster has
    32 tokens, so the same budget holds more clusters, for 5 bytes more per key (head_dim 128, bf16). Half of the initial
    centroids are drawn. The other half are the keys that these cover worst (`kvthaw.index.clusters.covering`). From there 8
    iterations find what 20 find otherwise. Generated tokens leave the window 16 at a time. They compete as clusters in text
    order until `batch` of them are clustered.

    Options as in clusterkv; policy says how the query heads of a group agree. Host: the rows. Device: the centroids, the map of
    tokens and clusters, k-means, every decision.
    """
    return cluster_method(
        "clusterkv-plus",
        Regions(16, 16, 16),
        keep,
        differs="32 tokens a cluster, not 80; k-means starts from covering keys, not random ones, and takes 8 iterations; "
        "generated tokens leave by 16, not 320",
        choose="the least device memory among fast methods, with about 1,000 tokens",
        policy=policy,
        distance=distance,
        tokens_per_cluster=tokens_per_cluster,
        clusters=clusters,
        batch=batch,
        clusters_per_batch=clusters_per_batch,
        start=start,
        iterations=iterations,
    )
