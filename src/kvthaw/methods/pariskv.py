"""ParisKV (Qi et al., 2026): collisions with analytic centroids choose candidates, 4-bit codes rank them, all on the device."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from kvthaw.cache.index_api import Method
from kvthaw.errors import at_least
from kvthaw.index.codes import CodesIndex, Policy
from kvthaw.index.ratios import Ratios
from kvthaw.regions import Regions

Preset = Literal["paper", "code"]

PRESETS: dict[str, Policy] = {"paper": "max", "code": "mean_query"}


def pariskv(
    *,
    preset: Preset = "paper",
    policy: Policy | None = None,
    rho: float | None = None,
    beta: float | None = None,
    candidates: int | None = None,
    votes: Literal["tiered", "binary"] = "tiered",
    full_threshold: int = 0,
) -> Method:
    """Select the tokens whose sign patterns collide most with the query's, ranked by 4-bit codes (algorithm 1).

    The paper retrieves 100 rows (`retrieved=100`) besides sink 128, window 256 and update buffer 512 (table 1), in every
    layer. A budget below 1,792 shrinks these regions; `Stats.regions` tells.

    rho, beta: shares of the keys that collide in a subspace and that become candidates. The paper says 5 to 10 % for beta,
        more for short contexts, and rho >= beta. The numbers by length come from the authors' code: 20 and 10 % from 30,000
        keys on (Ratios).
    candidates: a fixed number of them instead of beta.
    policy: how the query heads of a group agree on one set of rows; the paper does not say.
    preset: "paper" has policy "max"; "code", as the authors' code, "mean_query": a group's mean query represents all its
        heads.
    votes: six tiers (appendix B.2.1) or one.
    full_threshold: attend to the whole retrieval region if it is shorter than this, whatever the budget. The paper has 1024
        to 2048. Off by default, because it keeps this number of rows on the device.

    Host: the rows. Device: each key's codes, centroids and weights (112 bytes for 128 dimensions); every decision. A step is
    captured in one graph.
    """
    at_least(0, full_threshold=full_threshold)
    return codes_method(
        "pariskv",
        dense_below=full_threshold,
        ratios=Ratios(rho, beta, candidates, votes == "tiered"),
        policy=policy or PRESETS[preset],
        dense_layers=0,
        differs="one choice a KV head; rho and beta by length are the authors' code's; no full "
        "attention to short contexts (`full_threshold=2048`); regions shrink below a budget of 1,792; rows of the last step stay; "
        "weights in bfloat16, levels in odd 1/256, a query's products in 8 bits a subspace, which change at most 2.4 % of the rows",
        choose="reproducing the paper",
    )


def codes_method(
    name: str,
    *,
    dense_layers: int = 2,
    differs: str,
    choose: str,
    **codes: Any,
) -> Method:
    """Return a method that ranks candidates by codes.

    codes: more of CodesIndex's options.
    """
    return Method(
        name,
        paper="ParisKV",
        unit="token",
        index=partial(CodesIndex, **codes),
        regions=Regions(128, 256, 512),
        dense_layers=dense_layers,
        differs=differs,
        choose=choose,
    )
