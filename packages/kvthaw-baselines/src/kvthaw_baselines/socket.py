"""SOCKET (Joshi et al., 2026): tokens by soft collisions of the query with hashed keys, times the length of their values."""

from __future__ import annotations

from functools import partial

from kvthaw.cache.index_api import Method
from kvthaw.index.tokens import Policy
from kvthaw.regions import Regions
from kvthaw_baselines.index.soft_hash import SoftHashIndex


def socket(*, bits: int = 10, tables: int = 60, tau: float = 0.3, values: bool = True, policy: Policy = "max") -> Method:
    """60 tables of 2^10 buckets, temperature 0.3: 600 bits a key.

    bits: the paper has 8 to 12.
    tau: of the softmax over a table's buckets; its logits are also divided by sqrt(head_dim), as in the authors' code.
    values: weigh each token's chance by its value's length, as in the paper. On keys of pretrained models these lengths
        outweigh the chances, and False covers more attention: docs/methods.md.
    policy: how the query heads of a group agree on tokens, by each token's share of a head's scores. Sink 128 and window
        128, as in its experiments.

    On the device: buckets (2 L bytes a key, L where bits is at most 8), lengths of values if they count, the choice. On the host:
    rows. It is plain torch, a lookup a table.
    """
    index = partial(SoftHashIndex, bits=bits, tables=tables, tau=tau, values=values, policy=policy)
    return Method(
        "socket",
        paper="SOCKET",
        unit="token",
        index=index,
        regions=Regions(128, 128, 16),
        differs="one choice a KV head, the authors' one a query head",
        choose="comparing with soft LSH",
    )
