"""Work that is queued until a layer needs it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch

from kvthaw.cache.streams import DeferredBatch


def test_items_of_a_kind_are_done_at_once_and_only_once() -> None:
    done: list[tuple[str, list[int]]] = []

    def work(name: str, items: Sequence[int]) -> None:
        done.append((name, list(items)))

    deferred = DeferredBatch()
    owners = [object() for _ in range(3)]
    for owner, (kind, item) in zip(owners, (("a", 1), ("b", 2), ("a", 3)), strict=True):
        deferred.defer(owner, kind, partial(work, kind), item)
    assert [*deferred.owners] == owners
    assert not done
    deferred.flush()
    assert done == [("a", [1, 3]), ("b", [2])]
    assert not deferred.owners
    deferred.defer(owners[0], "a", partial(work, "a"), 4)
    assert [*deferred.owners] == owners[:1]
    deferred.flush()
    deferred.flush()
    assert done[2:] == [("a", [4])]


def test_the_work_of_an_owner_is_done_in_the_order_in_which_it_queued_it() -> None:
    deferred, done = DeferredBatch(), []
    for owner, kinds in (("a", "xz"), ("b", "yz"), ("c", "xzz")):  # y came after z
        for kind in kinds:
            deferred.defer(owner, kind, lambda items: done.extend(items), owner + kind)
    deferred.flush()
    for owner, kinds in (("a", "xz"), ("b", "yz"), ("c", "xzz")):
        assert [item[1] for item in done if item[0] == owner] == list(kinds)


def test_work_that_fails_is_not_tried_again() -> None:
    deferred = DeferredBatch()

    def fail(items: Sequence[object]) -> None:
        raise MemoryError(f"{len(items)} items")

    deferred.defer(deferred, "done", len, 0, [3])
    deferred.defer(deferred, "a", fail, 1, [1])
    deferred.defer(deferred, "b", len, 2, [0, 2])
    with pytest.raises(MemoryError, match="1 items"):
        deferred.flush()
    assert deferred.lost == {0, 1, 2}
    deferred.flush()


def test_what_layers_would_make_alike_is_made_once_while_few_others_are_asked_for() -> None:
    deferred, made = DeferredBatch(), []

    def make(key: int) -> int:
        made.append(key)
        return 10 * key

    for key in (1, 1, 2, 1, *range(3, 9), 1):
        assert deferred.once(key, partial(make, key)) == 10 * key
    assert made == [*range(1, 9)]
    for key in (9, 1):  # the ninth takes the place of the first
        deferred.once(key, partial(make, key))
    assert made[8:] == [9, 1]
    table = deferred.numbers([(1, 2), (3, 4)], torch.device("cpu"))
    assert table.dtype == torch.int32
    assert table is deferred.numbers(((1, 2), (3, 4)), torch.device("cpu"))
    assert table.tolist() == [[1, 2], [3, 4]]
