"""Work that comes to several layers at once, done at once: small kernels of thirty layers cost little more than those of one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any


class Together:
    """What layers of a cache put off until one of them needs it. Whoever puts something off has it done, by `do_for`, before he
    reads or writes what the work will write."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, tuple[Callable[[Sequence[Any]], None], list[Any]]] = {}
        self._owners: set[object] = set()

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

    def __deepcopy__(self, memo: dict[int, object]) -> Together:
        return Together()  # whoever copies an index has had its work done
