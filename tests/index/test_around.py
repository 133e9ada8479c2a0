"""An index around another one hides nothing of it."""

from __future__ import annotations

from kvthaw.cache.index_api import Index, Tables
from kvthaw.index.around import AroundIndex


def test_every_call_of_an_index_reaches_the_inner_one() -> None:
    """A method that Index gets later must not fall back to its default in silence."""
    names = {name for each in (Tables, Index) for name in vars(each) if not name.startswith("_")}
    by_select = {"prepare"}  # as a subclass's selection is
    refused = {"snapshot", "state", "take"}  # the traits say so
    assert names - by_select - refused - {"traits"} <= vars(AroundIndex).keys()
