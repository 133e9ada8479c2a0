"""The names of kvthaw's methods, apart from what they import: a command refuses a wrong one at once."""

from __future__ import annotations

import re

AUTO = "auto"
"""Stands for no method: see `kvthaw.methods.auto`."""
GROUP = "kvthaw.methods"
"""The entry points of packages that have methods: the name is the method's, the value the function that makes it."""
NAMES = (
    "full", "oracle", "streaming", "h2o", "snapkv", "snapkv-refreshed", "clusterkv", "clusterkv-plus", "prkv", "prkv-plus",
    "arkvale", "quest", "icecache", "icecache-reuse", "icecache-digest", "icecache-digest-device", "pariskv", "pariskv-plus",
    "thaw", "pqcache", "magicpig", "omnikv", "freekv", "twilight", "shadowkv", "retroinfer", "infinigen", "socket",
)  # fmt: skip
"""Those of METHODS, in `kvthaw.methods`, in the same order (tests/methods/test_registry.py)."""


def split_names(text: str) -> list[str]:
    """Read names with options from a list separated by commas, in which an option alone belongs to the name before it: "full,
    quest:budget=64,sink=4" is full and quest:budget=64:sink=4."""
    found: list[str] = []
    for part in map(str.strip, re.split(r",(?![^(]*\))", text)):
        if found and re.match(r"\w+=", part):
            found[-1] += f":{part}"
        elif part:
            found.append(part)
    return found
