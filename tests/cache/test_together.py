"""Work that is put off until somebody needs it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial

import pytest

from kvthaw.cache.together import Together


def test_items_of_a_kind_are_done_at_once_and_only_once() -> None:
    done: list[tuple[str, list[int]]] = []

    def work(name: str, items: Sequence[int]) -> None:
        done.append((name, list(items)))

    together = Together()
    for kind, item in (("a", 1), ("b", 2), ("a", 3)):
        together.put_off(kind, partial(work, kind), item)
    twin = copy.deepcopy(together)
    assert not done
    together.do()
    assert done == [("a", [1, 3]), ("b", [2])]
    together.do()
    twin.do()
    assert len(done) == 2


def test_work_that_fails_is_not_tried_again() -> None:
    together = Together()

    def fail(items: Sequence[object]) -> None:
        raise MemoryError(f"{len(items)} items")

    together.put_off("a", fail, 1)
    with pytest.raises(MemoryError, match="1 items"):
        together.do()
    together.do()
