"""Index updates of all layers, queued and run in one kernel: thirty layers take little longer than one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvthaw.cache.device_lengths import upload

_Made = TypeVar("_Made")
_KEPT = 8


class DeferredBatch:
    """Work that layers queue until one of them needs its result, and small tables that all of them need.

    An owner calls `flush_for` before it reads or writes the targets of its queued work.

    lost: sequences whose work was dropped, because it or earlier work failed.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, tuple[Callable[[Sequence[Any]], None], list[Any], set[int]]] = {}
        self._owners: dict[object, Hashable] = {}  # and of what kind each queued last
        self._made: dict[Hashable, Any] = {}
        self.lost: set[int] = set()

    def defer(
        self, owner: object, kind: Hashable, work: Callable[[Sequence[Any]], None], item: Any, seqs: Iterable[int] = ()
    ) -> None:
        """Queue an item that belongs to `seqs`. work(items) later runs once for all items of a kind, after the owner's earlier
        work."""
        kinds = list(self._waiting)
        if kind in kinds and owner in self._owners and kinds.index(self._owners[owner]) > kinds.index(kind):
            self.flush()
        _, items, of = self._waiting.setdefault(kind, (work, [], set()))
        items.append(item)
        of.update(seqs)
        self._owners[owner] = kind

    def flush(self) -> None:
        """Run all queued work, kinds in their order of arrival. If one fails, the rest is dropped."""
        waiting, self._waiting = list(self._waiting.values()), {}
        self._owners.clear()
        for i, (work, items, _) in enumerate(waiting):
            try:
                work(items)
            except BaseException:
                self.lost.update(*(seqs for _, _, seqs in waiting[i:]))
                raise

    def flush_for(self, owner: object) -> None:
        """Run all queued work if the owner has queued some of it."""
        if owner in self._owners:
            self.flush()

    def once(self, key: Hashable, make: Callable[[], _Made]) -> _Made:
        """Return make(), cached per key. The eight latest keys are kept. The result is read-only and used on the current
        stream."""
        if key not in self._made:
            if len(self._made) == _KEPT:
                del self._made[next(iter(self._made))]
            self._made[key] = make()
        made: _Made = self._made[key]
        return made

    def numbers(self, rows: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
        """Return rows of numbers on the device, [R, C] int32, copied once for all layers without a host sync."""
        kept = tuple(rows)
        return self.once((kept, device), lambda: upload(kept, torch.int32, device))

    def __deepcopy__(self, memo: dict[int, object]) -> DeferredBatch:
        return DeferredBatch()  # an index that is copied has flushed its work
