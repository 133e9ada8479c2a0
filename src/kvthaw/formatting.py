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
    """Return a number of bytes given as such, or as text with a unit: "500MB", "8 GiB". Units are powers of 1024, as memory is sold
    and as kvthaw prints them: "24GB" and "24GiB" are the same. Raises ConfigError, by name."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])?(?:i?B)?)\s*", str(given), re.IGNORECASE)
    if found is None:
        raise ConfigError(f'{name} is {given!r}; it must be a number of bytes, or one with a unit such as "8GiB"')
    unit = 1024 ** " KMGT".index((found[2] or " ").upper())
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


def counted(count: int, thing: str) -> str:
    """Return a number of things, such as "1 token" or "4,096 tokens"."""
    return f"{count:,} {thing}{'s' * (count != 1)}"


def short(tokens: int) -> str:
    """36,864 as 36k, 1,048,576 as 1M."""
    for many, name in ((1 << 20, "M"), (1 << 10, "k")):
        if tokens >= many:
            return f"{tokens / many:.3g}{name}"
    return str(tokens)
