"""Twilight (Lin et al., 2025): another method's candidates, pruned to the fewest that hold a share p of the softmax."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvthaw.cache.index_api import Method
from kvthaw.errors import ConfigError
from kvthaw.methods import resolve
from kvthaw_baselines.index.pruned import PrunedIndex


def twilight(*, base: str | Method = "quest", p: float = 0.85, spare: int = 4) -> Method:
    """Select the top-p of another method's proposal: a sharp head reads few rows, a flat one the whole budget.

    base: a name in METHODS, possibly with options, or a Method. It must not weigh rows, estimate attention or rebuild keys.
    p: the paper's, of the candidates' softmax estimated with 4-bit keys.
    spare: the base proposes this multiple of the budget's rows. The paper takes a quarter of the context as candidates.

    GQA: each query head keeps its own top-p. A KV head's rows are their union, cut to the budget by the largest weight.
    Regions are the base's.

    On the device (or on the host, if the base selects there): a 4-bit copy of every key, D / 2 + 8 bytes, and the base's
    own data. On the host: rows.
    """
    inner = resolve(base)
    if inner.index is None:
        raise ConfigError(f"base is {inner.name}, which selects nothing; it must be a method that does")
    index = partial(PrunedIndex, index=inner.index, p=p, spare=spare)
    return replace(
        inner,
        name="twilight",
        paper="Twilight",
        index=index,
        differs="proposes four times the budget, not a quarter of the context; cuts the union to the budget",
        choose="heads differ much in how many tokens they need; it has quest's regions, without a sink (`sink=16`)",
    )
