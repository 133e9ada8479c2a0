"""FreeKV (Liu et al., 2025): pages recalled for the previous token's query, corrected where the query turned."""

from __future__ import annotations

from functools import partial

from kvthaw.cache.index_api import Method
from kvthaw.errors import at_least
from kvthaw.kernels.page_bounds import Spread
from kvthaw.kernels.unit_select import Policy
from kvthaw.regions import Regions
from kvthaw_baselines.index.lagged import LaggedIndex


def freekv(*, tau: float = 0.8, page: int = 32, spread: Spread = "max", policy: Policy = "mean") -> Method:
    """Select pages of 32 by the previous query, from their channels' minimum and maximum.

    A KV head whose two queries have a mean cosine below tau uses its own query instead.

    tau: the paper's value for long prompts. It has 0.9 for long answers, and above 0.99 the method is nearly Quest.
    policy: how the query heads of a group agree, see `kvthaw.kernels.unit_select.Policy`; the paper's is the mean of their
        softmax weights. Sink 512, window 512, as in the paper.

    On the device: pages' bounds, both queries, the choice. On the host: rows. The paper's gain in time is missing here: a
    layer selects and fetches in one step. The choice is FreeKV's, but the rest of the model does not hide the transfer.
    """
    at_least(1, page=page)
    index = partial(LaggedIndex, page=page, spread=spread, policy=policy, tau=tau)
    return Method(
        "freekv",
        paper="FreeKV",
        unit="page",
        index=index,
        regions=Regions(512, 512, page),
        differs="does not hide the transfer; sink and window shrink below a budget of 2,112",
        choose="comparing with speculative page recall",
    )
