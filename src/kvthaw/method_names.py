"""The names of kvthaw's methods, without imports, so that a command refuses a wrong name at once."""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvthaw.errors import ConfigError, unknown

AUTO = "auto"
"""The name auto, which is not a method: see `kvthaw.methods.auto`."""
GROUP = "kvthaw.methods"
"""The entry points of packages that have methods: the name is the method's, the value the function that makes it."""
OWN = {
    "full": "full:full",
    "oracle": "oracle:oracle",
    "streaming": "streaming:streaming",
    "clusterkv": "clusterkv:clusterkv",
    "clusterkv-plus": "clusterkv_plus:clusterkv_plus",
    "prkv": "prkv:prkv",
    "icecache": "icecache:icecache",
    "icecache-reuse": "icecache:icecache_reuse",
    "icecache-digest": "icecache_digest:icecache_digest",
    "pariskv": "pariskv:pariskv",
    "pariskv-plus": "pariskv_plus:pariskv_plus",
    "thaw": "thaw:thaw",
}
"""kvthaw's own methods: for each name the module in `kvthaw.methods` and its function that makes the Method from its options."""
BASELINES = (
    "h2o", "snapkv", "snapkv-refreshed", "arkvale", "quest", "pqcache", "magicpig", "omnikv", "freekv", "twilight", "shadowkv",
    "retroinfer", "infinigen", "socket", "prkv-plus", "icecache-digest-device",
)  # fmt: skip
"""The methods of the package kvthaw-baselines, in the order of its entry points."""


def unknown_method(name: str, known: Iterable[str]) -> ConfigError:
    """Return the error for a name that is no method's. For a baseline it says how to install them."""
    if name in BASELINES:
        return ConfigError(
            f"method is {name!r}, a baseline, which is not installed: pip install 'kvthaw[baselines]', or "
            "./packages/kvthaw-baselines in a clone of kvthaw's repository"
        )
    return unknown("method", name, known)


def split_names(text: str) -> list[str]:
    """Read names with options from a list separated by commas, in which an option alone belongs to the name before it: "full,
    prkv:budget=64,sink=4" is full and prkv:budget=64:sink=4."""
    found: list[str] = []
    for part in map(str.strip, re.split(r",(?![^(]*\))", text)):
        if found and re.match(r"\w+=", part):
            found[-1] += f":{part}"
        elif part:
            found.append(part)
    return found
