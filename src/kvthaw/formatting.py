"""Numbers as text for people."""

from __future__ import annotations


def human(count: float | None) -> str:
    """Bytes for people, in powers of 1024."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def share(value: float | None) -> str:
    """A share as a percentage."""
    return "-" if value is None else f"{100 * value:.1f} %"


def seconds(value: float | None) -> str:
    """Seconds, or milliseconds below one."""
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.1f} ms"


def number(value: float | None) -> str:
    """A mean with one digit, a whole number with none."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"
