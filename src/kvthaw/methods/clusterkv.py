"""ClusterKV (Liu et al., 2024): semantic clusters of keys, taken whole in the order of q.mu."""

from __future__ import annotations

from functools import partial

from kvthaw.cache.regions import Regions
from kvthaw.index.clusters import ClusterIndex, Start
from kvthaw.kernels.kmeans import Distance
from kvthaw.kernels.unit_select import Policy
from kvthaw.types import Method


def clusterkv(
    *,
    policy: Policy = "max",
    distance: Distance = "cosine",
    tokens_per_cluster: int = 80,
    clusters: int | None = None,
    batch: int = 320,
    clusters_per_batch: int = 4,
    start: Start = "covering",
    iterations: int = 8,
    keep: int = 1,
) -> Method:
    """Clusters of the prompt's keys and, every `batch` tokens, of those that came since.

    policy: how the query heads of a group agree, see `kvthaw.kernels.unit_select.Policy`. distance: what k-means compares by.
    clusters: as many for any prompt (the paper's C0), instead of one for every tokens_per_cluster. clusters_per_batch: of later
    tokens (the authors' code: 8). start: the first centroids. The paper draws them among the keys, start="random"; the few keys of
    a needle are then often lost in a cluster of others, so kvthaw draws half of them and adds the keys that those cover worst
    (`kvthaw.index.clusters.covering`). iterations: of k-means, at most; the paper has 20, which find hardly more from this start.
    keep: the paper's R, of how many steps the selected rows stay on the device. The paper keeps 16 sink tokens; it states no
    window, so tokens leave by 16.
    """
    index = partial(
        ClusterIndex,
        policy=policy,
        distance=distance,
        tokens_per_cluster=tokens_per_cluster,
        clusters=clusters,
        batch=batch,
        clusters_per_batch=clusters_per_batch,
        start=start,
        iterations=iterations,
    )
    regions = Regions(16, 16, 16)
    return Method("clusterkv", paper="ClusterKV", unit="cluster", index=index, regions=regions, keep=keep, any_budget=True)
