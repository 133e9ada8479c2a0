"""ShadowKV (Sun et al., 2024): chunks by their mean key; their keys made again from a low rank on the device."""

from __future__ import annotations

from functools import partial

from kvthaw.cache.index_api import Method
from kvthaw.errors import at_least
from kvthaw.kernels.unit_select import Policy
from kvthaw.regions import Regions
from kvthaw_baselines.index.shadow import ShadowIndex


def shadowkv(*, chunk: int = 8, rank: int = 160, outliers: int = 48, policy: Policy = "max") -> Method:
    """Chunks of 8, rank 160 over all KV heads, 48 outlier chunks, a window of 4 chunks.

    outliers: chunks that are always selected, with their own keys; at most a quarter of what the budget leaves to the
        index.
    policy: how the query heads of a group agree, see `kvthaw.kernels.unit_select.Policy`; the paper's is the largest
        softmax weight. Tokens that come after the prompt leave the window by chunks, with a landmark each and their own
        keys; in the paper they stay. So does every key if the budget covers the whole sequence.

    On the device: landmarks, D / 8 elements a key, the map, 4 bytes, and the factors, rank / H elements; the choice; and
    the keys of the rows that were fetched, made of factors and turned to their positions. On the host: rows. The output is
    ShadowKV's, the saving on the bus is not: the shared transfer fetches whole rows, and the rebuilt key overwrites the
    fetched one. This moves twice the paper's bytes. Factors are made on the device, by the eigenvectors of a matrix of (H
    D)^2, which the host waits for once a layer.
    """
    at_least(1, chunk=chunk)
    index = partial(ShadowIndex, chunk=chunk, rank=rank, outliers=outliers, policy=policy)
    return Method(
        "shadowkv",
        paper="ShadowKV",
        unit="page",
        index=index,
        regions=Regions(0, 4 * chunk, chunk),
        rotary=True,
        differs="moves whole rows, twice the bytes; caps outliers at a quarter of the budget; later tokens leave the window",
        choose="comparing with low-rank keys",
    )
