"""Twilight (Lin et al., 2025): another method's candidates, pruned to the fewest that hold a share p of the softmax."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvthaw.cache.index_api import Method
from kvthaw.errors import ConfigError
from kvthaw.methods import resolve
from kvthaw_baselines.index.pruned import PrunedIndex


def twilight(*, base: str | Method = "quest", p: float = 0.85, spare: int = 4) -> Method:
    """The top-p of what another method proposes, so that a sharp head reads few rows and a flat one as many as the budget has.

    base: a name in METHODS, with options if need be, or a Method; it may not weigh rows, estimate
        attention or make keys of its own.
    p: the paper's, of the candidates' softmax by keys in 4 bits.
    spare: how many times the budget's rows the base proposes; the paper takes a quarter of the context as candidates,
        whatever that is. GQA: each query head keeps its own top-p, and a KV head brings the union, cut to the budget by the
        largest weight. Regions are the base's.

    On the device (or on the host, where the base decides there): a 4-bit copy of every key, D / 2 + 8 bytes, and what the base has.
    On the host: rows.
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
