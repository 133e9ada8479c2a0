"""Work that comes to several layers at once, done at once: small kernels of thirty layers cost little more than those of one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any


class Together:
    """What layers of a cache put off until one of them needs it. Whoever puts something off asks for it before he reads or writes
    what the work will write."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, tuple[Callable[[Sequence[Any]], None], list[Any]]] = {}

    def put_off(self, kind: Hashable, work: Callable[[Sequence[Any]], None], item: Any) -> None:
        """Have work(items) done later, once for all items of a kind."""
        self._waiting.setdefault(kind, (work, []))[1].append(item)

    def do(self) -> None:
        """Do it, kinds in the order in which they came."""
        waiting, self._waiting = self._waiting, {}
        for work, items in waiting.values():
            work(items)

    def __deepcopy__(self, memo: dict[int, object]) -> Together:
        return Together()  # whoever copies an index has asked for its work
