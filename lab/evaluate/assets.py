"""Texts of the laboratory's own folder of assets."""

from __future__ import annotations

from functools import cache
from pathlib import Path

ASSETS = Path(__file__).parents[1] / "assets"


@cache
def read_own(name: str) -> str:
    """Return a text that lies in `ASSETS`."""
    return (ASSETS / name).read_text(encoding="utf-8")
