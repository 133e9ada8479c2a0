"""ParisKV (Qi et al., 2026): collisions with analytic centroids choose candidates, 4-bit codes rank them, all on the device."""

from __future__ import annotations

from functools import partial
from typing import Literal, get_args

from kvthaw.cache.regions import Regions
from kvthaw.errors import ConfigError
from kvthaw.index.codes import Centroids, CodesIndex, Policy
from kvthaw.index.ratios import Ratios
from kvthaw.types import Method

Preset = Literal["paper", "code"]
Votes = Literal["tiered", "binary"]


def pariskv(
    *,
    preset: Preset = "paper",
    policy: Policy | None = None,
    rho: float | None = None,
    beta: float | None = None,
    candidates: int | None = None,
    votes: Votes = "tiered",
    rotate: bool = True,
    normalise: bool = True,
    centroids: Centroids = "signs",
    full_threshold: int = 0,
    window: int = 256,
    buffer: int = 512,
) -> Method:
    """Sink 128, window 256, update buffer 512 (table 1); top-k rows by estimated softmax weight.

    preset: "paper" lets the query heads of a group agree by policy "max", "code" by the authors' "mean_query"; policy
    overrides. rho, beta: shares of the keys that collide and that become candidates, by region length unless given; candidates:
    a fixed number of them instead. full_threshold: a retrieval region shorter than this is attended to whole, whatever the
    budget (the paper has 1024 to 2048, beside `retrieved`); 0 keeps the budget's promise. A region that fits in the rows to be
    retrieved is always attended to whole. votes, rotate, normalise, centroids: ablations, see CodesIndex and Ratios."""
    policy = policy or ("max" if preset == "paper" else "mean_query")
    choices = (
        ("preset", preset, Preset),
        ("votes", votes, Votes),
        ("policy", policy, Policy),
        ("centroids", centroids, Centroids),
    )
    for name, value, allowed in choices:
        if value not in get_args(allowed):
            raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(get_args(allowed))}")
    for name, switch in (("rotate", rotate), ("normalise", normalise)):
        if not isinstance(switch, bool):
            raise ConfigError(f"{name} is {switch!r}; it must be True or False")
    if full_threshold < 0:
        raise ConfigError(f"full_threshold is {full_threshold}; it must be at least 0")
    index = partial(
        CodesIndex,
        policy=policy,
        ratios=Ratios(rho, beta, candidates, votes == "tiered"),
        rotate=rotate,
        normalise=normalise,
        centroids=centroids,
        dense_below=full_threshold,
    )
    return Method("pariskv", paper="ParisKV", unit="token", index=index, regions=Regions(128, window, buffer))
