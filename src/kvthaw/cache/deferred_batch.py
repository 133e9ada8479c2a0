"""What comes to several layers at once, done or made once: small kernels of thirty layers cost little more than those of one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

_Made = TypeVar("_Made")
_KEPT = 8


class DeferredBatch:
    """What layers of a cache put off until one of them needs it. Whoever puts something off has it done, by `do_for`, before he
    reads or writes what the work will write. And small tables that all of them need."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, tuple[Callable[[Sequence[Any]], None], list[Any]]] = {}
        self._owners: set[object] = set()
        self._made: dict[Hashable, Any] = {}

    def put_off(self, owner: object, kind: Hashable, work: Callable[[Sequence[Any]], None], item: Any) -> None:
        """Have work(items) done later, once for all items of a kind."""
        self._waiting.setdefault(kind, (work, []))[1].append(item)
        self._owners.add(owner)

    def do(self) -> None:
        """Do all of it, kinds in the order in which they came."""
        waiting, self._waiting = self._waiting, {}
        self._owners.clear()
        for work, items in waiting.values():
            work(items)

    def do_for(self, owner: object) -> None:
        """Do all of it if some is the owner's."""
        if owner in self._owners:
            self.do()

    def once(self, key: Hashable, make: Callable[[], _Made]) -> _Made:
        """What make() gives, made once for all that ask by the same key before eight others were asked for. Nobody writes to it,
        and it is used on the current stream."""
        if key not in self._made:
            if len(self._made) == _KEPT:
                del self._made[next(iter(self._made))]
            self._made[key] = make()
        made: _Made = self._made[key]
        return made

    def numbers(self, rows: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
        """Rows of numbers on the device, [R, C] int32, brought there once for all layers; the host does not wait."""
        kept = tuple(rows)
        return self.once((kept, device), lambda: torch.tensor(kept, dtype=torch.int32).to(device, non_blocking=True))

    def __deepcopy__(self, memo: dict[int, object]) -> DeferredBatch:
        return DeferredBatch()  # whoever copies an index has had its work done
