"""Methods of the papers with a part replaced, which the papers' ablations compare with. kvthaw itself has none of them.

`python -m lab reproduce` knows them; other commands take them by `--plugin lab/ablations.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvthaw.methods import METHODS as ALL
from kvthaw.methods.registry import Make
from lab.ablated_codes import pariskv_ablated, pariskv_each, pariskv_plus_ablated, pariskv_plus_each
from lab.page_order import icecache_copies, prkv_copies

METHODS: dict[str, Make] = {
    "pariskv-ablated": pariskv_ablated,
    "pariskv-each": pariskv_each,
    "pariskv-plus-ablated": pariskv_plus_ablated,
    "pariskv-plus-each": pariskv_plus_each,
    "prkv-copies": prkv_copies,
    "icecache-copies": icecache_copies,
}


@contextmanager
def registered() -> Iterator[None]:
    """Register the ablations within a block."""
    for name, make in METHODS.items():
        ALL.register(name, make)
    try:
        yield
    finally:
        for name in METHODS:
            ALL.unregister(name)
