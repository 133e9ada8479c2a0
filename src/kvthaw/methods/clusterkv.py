"""ClusterKV (Liu et al., 2024): semantic clusters of keys, taken whole in the order of q.mu."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from kvthaw.cache.index_api import Method
from kvthaw.errors import at_least
from kvthaw.index.clusters import Choice, ClusterIndex, Start
from kvthaw.kernels.kmeans import Distance
from kvthaw.regions import Regions

Preset = Literal["paper", "code"]

_PRESETS: dict[str, tuple[Choice, int]] = {"paper": ("max", 4), "code": ("each", 8)}


def clusterkv(
    *,
    preset: Preset = "paper",
    policy: Choice | None = None,
    distance: Distance = "cosine",
    tokens_per_cluster: int = 80,
    clusters: int | None = None,
    batch: int = 320,
    clusters_per_batch: int | None = None,
    start: Start = "random",
    iterations: int = 20,
    keep: int = 1,
) -> Method:
    """Cluster the prompt's keys by k-means, and every `batch` generated tokens among themselves; select whole clusters by q.mu.

    The first 16 tokens are a sink. Generated tokens are attended until `batch` of them are clustered.

    preset: "paper" makes 4 clusters of a batch, and the query heads of a KV head choose together (the paper does not say
        how). "code", the authors', makes 8 clusters, and every query head chooses for itself. A budget counts the rows that
        a KV head reads, so each of its G query heads takes 1 / G of them. `retrieved=G * B` is the authors' budget B.
    policy: "each", or how the query heads of a group agree, see `kvthaw.kernels.unit_select.Policy`.

    tokens_per_cluster: of the prompt (C0 = L / 80).
    clusters: this number for any prompt, instead.
    clusters_per_batch: C+ (the paper's m is batch).
    start, iterations: how k-means starts, and its most iterations.
    distance: how k-means compares keys.
    keep: R, for how many steps selected rows stay on the device.

    Host: the rows. Device: the centroids, the map of tokens and clusters, k-means, every decision.
    """
    at_least(1, batch=batch)
    own_policy, own_clusters = _PRESETS[preset]
    return cluster_method(
        "clusterkv",
        Regions(16, 1, batch),
        keep,
        differs="a budget below 674 shrinks the 320 tokens; one choice a KV head (`preset=code`: one a query head); rows stay "
        "on the device one by one, not by clusters",
        choose="reproducing the paper",
        policy=own_policy if policy is None else policy,
        distance=distance,
        tokens_per_cluster=tokens_per_cluster,
        clusters=clusters,
        batch=batch,
        clusters_per_batch=own_clusters if clusters_per_batch is None else clusters_per_batch,
        start=start,
        iterations=iterations,
    )


def cluster_method(name: str, regions: Regions, keep: int, *, differs: str, choose: str, **clusters: Any) -> Method:
    """Return a method that selects clusters.

    clusters: ClusterIndex's options.
    """
    return Method(
        name,
        paper="ClusterKV",
        unit="cluster",
        index=partial(ClusterIndex, **clusters),
        regions=regions,
        keep=keep,
        any_budget=True,
        differs=differs,
        choose=choose,
    )
