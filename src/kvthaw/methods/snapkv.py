"""SnapKV (Li et al., 2024): the prompt's last queries choose, once, which of its tokens stay."""

from __future__ import annotations

from functools import partial

from kvthaw.cache.index_api import Method
from kvthaw.errors import at_least
from kvthaw.index.kept import Agree
from kvthaw.index.snap import FreshSnapIndex, Pooling, SnapIndex
from kvthaw.regions import Regions


def snapkv(
    *, width: int = 32, kernel: int = 7, pooling: Pooling = "avg", agree: Agree = "mean", refresh: int | None = None
) -> Method:
    """The tokens of most attention from the last `width` queries of the prompt, pooled over `kernel` neighbours, beside a window of
    `width`. The paper's kernels are 5 to 7; the default is the one that finds more with the model that ships.

    agree: how the query heads of a group agree, "mean" or "max" of their attention (the authors keep a choice for each query head).
    Generated tokens, all of which SnapKV keeps, must fit the budget too: they stay in the ring, and behind it while there is room.
    Host: rows that were not chosen lie there unread, so that a long continuation, which is a new prompt, may choose from them.
    Device: the choice and the rows chosen; nothing else of a key. refresh: choose again every so many tokens, by the last queries
    and from all keys, which cross the bus for it between two steps; nothing is evicted then.
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
