"""Random choices that derive from seed, layer, head and position, so that no place in a batch or process changes them."""

from __future__ import annotations

import torch
from torch import Tensor

from kvthaw.cache.index_api import IndexContext
from kvthaw.counter_rng import GOLDEN, SPREAD, mix


def stream(context: IndexContext, each: int = 1) -> int:
    """The number of a layer's first head in this process among all heads that draw.

    each: how many numbers a head has.
    """
    return ((context.seed * 1_000_003 + context.layer) * 65_537 & ((1 << 63) - 1)) + context.heads.start * each


def drawn(positions: Tensor, count: int, streams: Tensor) -> Tensor:
    """`count` of n positions for every head, as indices into positions [..., n], [..., count] int64, ascending: those whose hash of
    the head's number, streams [..., 1] int64, and the position is least. count <= n."""
    x = mix(positions.long() * GOLDEN + streams * SPREAD)
    return torch.topk(x, count, dim=-1, largest=False).indices.sort(dim=-1).values
