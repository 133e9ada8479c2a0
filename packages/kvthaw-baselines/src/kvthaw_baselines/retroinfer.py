"""RetroInfer (Chen et al., 2025): the best clusters are read, the next estimated from their centroids, the others left out."""

from __future__ import annotations

from functools import partial

from kvthaw.cache.index_api import Method
from kvthaw.index.clusters import Start
from kvthaw.kernels.unit_select import Policy
from kvthaw.regions import Regions
from kvthaw_baselines.index.wave import WaveIndex


def retroinfer(
    *,
    segment: int = 8192,
    tokens_per_cluster: int = 16,
    batch: int = 1024,
    estimated: float = 0.23,
    start: Start = "random",
    iterations: int = 10,
    policy: Policy = "mean",
) -> Method:
    """k-means of 16 tokens a cluster within segments of 8192 tokens, and within every 1024 that come later.

    The paper reads 1.8 % of the clusters and estimates the next 23 %; here the budget says how many rows are read, so only
    the second is a share. An estimated cluster costs no row of the budget: its centroid and mean value are on the device.
    estimated=0 reads only.
    start: the keys that k-means starts with, see `kvthaw.index.clusters.Start`.
    policy: how the query heads of a group agree on clusters, see `kvthaw.kernels.unit_select.Policy`; estimates are of each
        query head. Sink 4 and window 64, the paper's steady zone. Estimates know no softcap.

    On the device: centroids, mean values, the map of tokens and clusters (2 D / 16 elements and 4 bytes a key), the choice and the
    estimate. On the host: rows.
    """
    index = partial(
        WaveIndex,
        segment=segment,
        tokens_per_cluster=tokens_per_cluster,
        batch=batch,
        estimated=estimated,
        start=start,
        iterations=iterations,
        policy=policy,
    )
    return Method(
        "retroinfer",
        paper="RetroInfer",
        unit="cluster",
        index=index,
        regions=Regions(4, 64, 16),
        any_budget=True,
        differs="the budget says how many rows are read; k-means starts from random keys, "
        "the authors' from evenly spaced ones, with keys centred",
        choose="comparing with clusters whose rest is estimated",
    )
