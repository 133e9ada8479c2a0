"""ParisKV (Qi et al., 2026): collisions with analytic centroids choose candidates, 4-bit codes rank them, all on the device."""

from __future__ import annotations

from functools import partial
from typing import Literal, get_args

from kvthaw.cache.index_api import Method
from kvthaw.errors import ConfigError, at_least, one_of
from kvthaw.index.codes import Centroids, CodesIndex, Policy
from kvthaw.index.ratios import Ratios
from kvthaw.regions import Regions

Preset = Literal["default", "paper", "code"]
Votes = Literal["graded", "tiered", "binary"]


def pariskv(
    *,
    preset: Preset = "default",
    policy: Policy | None = None,
    rho: float | None = None,
    beta: float | None = None,
    candidates: int | None = None,
    votes: Votes | None = None,
    centre: bool | None = None,
    rotate: bool = True,
    normalise: bool = True,
    centroids: Centroids = "signs",
    full_threshold: int = 0,
    window: int = 256,
    buffer: int = 512,
) -> Method:
    """Sink 128, window 256, update buffer 512 (table 1); top-k rows by estimated softmax weight.

    preset: "default" has graded votes and takes the mean of the prompt's keys off all keys, which finds more of the exact rows
    among as many candidates; "paper" has tiers of votes (appendix B.2.1) and keys as they are; both let the query heads of a group
    agree by policy "max", with which 83 % of the exact top-100 are found at 32k ("mean": 79, "mean_query": 57) and as much of their
    attention mass as with "mean" (99.8 %; "mean_query": 98.6); "code" is "paper" with the authors' policy "mean_query". policy,
    votes, centre override it; a rho asks for tiers. rho, beta: shares of the keys that collide (graded: all) and that become
    candidates, by region length unless given; candidates: a fixed number of them instead. full_threshold: a retrieval region
    shorter than this is attended to whole, whatever the budget. The paper has 1024 to 2048; it is off (0), for it keeps so many
    rows on the device and attends to them in every step, whatever the length, and a budget would promise too little. A region that
    fits in the rows to be retrieved is always attended to whole. rotate, normalise, centroids: ablations; see CodesIndex and
    Ratios.

    Host: the rows. Device: a key's codes, centroids and weights (112 bytes of one of 128 dimensions), every decision."""
    at_least(1, window=window, buffer=buffer)
    at_least(0, full_threshold=full_threshold)
    policy = policy or ("mean_query" if preset == "code" else "max")
    votes = votes or ("graded" if preset == "default" and rho is None else "tiered")
    centre = preset == "default" if centre is None else centre
    one_of(get_args(Preset), preset=preset)
    one_of(get_args(Votes), votes=votes)
    one_of(get_args(Policy), policy=policy)
    one_of(get_args(Centroids), centroids=centroids)
    for name, switch in (("rotate", rotate), ("normalise", normalise), ("centre", centre)):
        if not isinstance(switch, bool):
            raise ConfigError(f"{name} is {switch!r}; it must be True or False")
    if votes == "graded" and rho is not None:
        raise ConfigError(
            f"rho is {rho} and votes is 'graded', with which all keys collide; give rho with 'tiered' or 'binary'"
        )
    graded = votes == "graded"
    index = partial(
        CodesIndex,
        policy=policy,
        ratios=Ratios(1.0 if graded else rho, beta, candidates, votes == "tiered"),
        graded=graded,
        centre=centre,
        rotate=rotate,
        normalise=normalise,
        centroids=centroids,
        dense_below=full_threshold,
    )
    return Method(
        "pariskv",
        paper="ParisKV",
        unit="token",
        index=index,
        regions=Regions(128, window, buffer),
        differs="by default votes by sign bits, no collisions and tiers, and keys centred on the prompt "
        "(`preset=paper`: neither); smaller regions below 1,792",
        choose="speed at long contexts and in large batches",
    )
