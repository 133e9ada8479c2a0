"""What timings of a model say its user should do."""

from __future__ import annotations

from collections.abc import Sequence

from kvthaw.bench.own import EXACT
from kvthaw.evaluate.plot import short
from kvthaw.evaluate.results import Record

FASTER, ALIKE = 0.95, 0.9
"""Shares of full attention's time below which a method is worth its approximation, and of its tokens that it should choose."""


def advice(records: Sequence[Record]) -> str:
    """Return a sentence on the records of `kvthaw.bench.own` at one length and batch."""
    first = records[0]
    at = f"At {short(first['length'])} tokens" + (f" x {first['batch']}" if first["batch"] > 1 else "")
    at = f"{at} on {'this CPU' if first['device'] == 'cpu' else first['device']}"
    exact = [one for one in records if one["method"] in EXACT]
    others = sorted((one for one in records if one not in exact), key=_time)
    held = [one for one in exact if one["method"] != "hf-offloaded"]
    if not held:
        fits_not = f"{at} full attention does not fit"
        if not others or (exact and _time(exact[0]) <= _time(others[0])):
            return f"{fits_not}; transformers' offloaded cache takes {_ms(exact[0])}: use it."
        beside = f", transformers' offloaded cache {_ms(exact[0])}" if exact else ""
        return f"{fits_not}; {_named(others[0])}{beside}: {_use(others[0])}."
    full, best = min(held, key=_time), others[0] if others else None
    fits = f"{at} full attention fits and takes {_ms(full)}"
    if best is not None and _time(best) < FASTER * _time(full):
        alike = next((one for one in others if one["agreement"] >= ALIKE and _time(one) < FASTER * _time(full)), None)
        if alike is None:
            return f"{fits}; {_named(best)}: keep full attention, or raise the budget."
        return f"{fits}; {_named(alike)}: {_use(alike)} if kvthaw eval shows that your task stands it."
    ours = full["method"] == "full" and _time(full) < FASTER * max(map(_time, held))
    through = ' through kvthaw.attach(model, "full")' if ours else ""
    less = "" if best is None else f"; {_named(best)} and holds {best['share_with_dense']:.0%} of its KV on the device"
    return f"{at} full attention fits and is fastest{through}, {_ms(full)}: keep it{less}."


def _named(one: Record) -> str:
    limit = "" if one["budget"] is None else f" at a budget of {one['budget']:,}"
    alike = "" if one["agreement"] is None else f", chooses {one['agreement']:.0%} of its tokens"
    return f"{one['method']}{limit} takes {_ms(one)}{alike}"


def _use(one: Record) -> str:
    asked = one.setting
    limits = "".join(f", {name}={asked[name]}" for name in ("budget", "retrieved") if asked[name] is not None)
    return f'use kvthaw.attach(model, "{asked["method"]}"{limits})'


def _time(one: Record) -> float:
    return float(one["tpot_s"])


def _ms(one: Record) -> str:
    return f"{1e3 * _time(one):.3g} ms a token"
