"""Numbers as text for people."""

from __future__ import annotations

import re

from kvthaw.errors import ConfigError


def human(count: float | None) -> str:
    """Return the bytes for people, in powers of 1024."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def read_bytes(given: int | str | None, name: str) -> int:
    """Return a number of bytes given as such, or as text with a unit: "500MB", "8 GiB". Raises ConfigError, by name."""
    units = {"": 1, "B": 1} | {
        f"{letter}{end}": base**n for end, base in (("B", 1000), ("iB", 1024)) for n, letter in enumerate("KMGT", 1)
    }
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(given))
    unit = None if found is None else {text.lower(): size for text, size in units.items()}.get(found[2].lower())
    if found is None or unit is None:
        raise ConfigError(f'{name} is {given!r}; it must be a number of bytes, or one with a unit such as "8GiB"')
    return int(float(found[1]) * unit) if "." in found[1] else int(found[1]) * unit


def share(value: float | None) -> str:
    """Return a share as a percentage."""
    return "-" if value is None else f"{100 * value:.1f} %"


def seconds(value: float | None) -> str:
    """Return the seconds, or milliseconds below one."""
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.1f} ms"


def number(value: float | None) -> str:
    """Return a mean with one digit, a whole number with none."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"
