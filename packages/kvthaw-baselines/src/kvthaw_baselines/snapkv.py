"""SnapKV (Li et al., 2024): the prompt's last queries choose, once, which of its tokens stay."""

from __future__ import annotations

from functools import partial

from kvthaw.cache.index_api import Method
from kvthaw.errors import at_least
from kvthaw.regions import Regions
from kvthaw_baselines.index.kept import Agree
from kvthaw_baselines.index.snap import FreshSnapIndex, Pooling, SnapIndex


def snapkv(
    *, width: int = 32, kernel: int = 7, pooling: Pooling = "avg", agree: Agree = "mean", refresh: int | None = None
) -> Method:
    """Select the tokens with the most attention from the last `width` prompt queries, pooled over `kernel` neighbours, and a
    window.

    The window has `width` tokens. The paper's kernels are 5 to 7; the default finds more with the shipped model.

    agree: how the query heads of a group agree, "mean" or "max" of their attention (the authors keep a choice for each
        query head).
    refresh: choose again every `refresh` tokens, by the last queries and from all keys, which then cross the bus between
        two steps. Nothing is evicted then.

    SnapKV keeps all generated tokens, and here they must fit the budget too. They stay in the ring, and after it while
    there is room. Host: rows that were not chosen, unread. A long continuation is a new prompt and may choose from them.
    Device: the choice and the chosen rows, and no other part of a key.
    """
    at_least(1, refresh=refresh)
    made = SnapIndex if refresh is None else partial(FreshSnapIndex, interval=refresh)
    index = partial(made, width=width, kernel=kernel, pooling=pooling, agree=agree)
    name = "snapkv" if refresh is None else "snapkv-refreshed"
    differs = "one choice a KV head, the authors' one a query head; generated tokens count towards the budget"
    if refresh is not None:
        differs += "; chooses again as it decodes, which is kvthaw's addition"
    return Method(
        name,
        paper="SnapKV",
        unit="token",
        index=index,
        regions=Regions(0, max(1, width), 16),
        differs=differs,
        choose="comparing with eviction at the end of the prompt",
    )


snapkv_refreshed = partial(snapkv, refresh=128)
"""SnapKV that chooses again every 128 tokens."""
