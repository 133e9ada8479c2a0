"""Tables on the device and counts on the host, an entry for each sequence, and places in them as indices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from kvthaw.cache.index_api import IndexContext, Tables
from kvthaw.cache.streams import DeferredBatch


class Full(NamedTuple):
    """Where a batch of a sequence begins: at place `begin` of the map and at unit `before`."""

    seq: int
    begin: int
    before: int


@dataclass(frozen=True, slots=True)
class Target:
    """Batches of R sequences as indices of tables [B, H, ..]: sequences [R, 1, 1], heads [H, 1], begin and before [R, 1, 1];
    int64."""

    seqs: Tensor
    heads: Tensor
    begin: Tensor
    before: Tensor

    @classmethod
    def of(cls, full: Sequence[Full], heads: int, device: torch.device) -> Target:
        """On a device; the host does not wait."""
        numbers = torch.tensor(full).to(device, non_blocking=True)
        return cls(
            numbers[:, 0, None, None], torch.arange(heads, device=device)[:, None], *numbers[:, 1:, None, None].unbind(1)
        )

    def units(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """The first n units of each, of tables of units."""
        return self.seqs, self.heads, self.before + torch.arange(n, device=self.before.device)

    def places(self, n: int, ring: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the first n places of each target in the map, and their places in a ring of `ring`, if given."""
        at = self.begin + torch.arange(n, device=self.begin.device)
        return self.seqs, self.heads, at if ring is None else at % ring


Held = tuple[dict[str, Tensor], list[Any]]
"""A sequence's row of each column, in host memory, and its items of the lists."""
T = TypeVar("T")


class SequenceTables(dict[str, Tensor]):
    """Columns by name, tensors [B, *shape] with a row for each sequence, and lists on the host with an item for each.

    A name among the sizes of a shape is a dimension that grows. A tensor keeps its address while there is room and the
    number of sequences stays.

    seqs: B.
    room: the size of each dimension that grows, by name.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.seqs = device, 0
        self.room: dict[str, int] = {}
        self._columns: dict[str, tuple[tuple[int | str, ...], float]] = {}
        self._lists: list[tuple[list[Any], Callable[[], Any]]] = []

    def add(self, name: str, shape: Sequence[int | str], dtype: torch.dtype, fill: float = 0) -> None:
        """Add a column, whose new entries are `fill`."""
        self._columns[name] = tuple(shape), fill
        self.room = {size: 0 for size in shape if isinstance(size, str)} | self.room
        self[name] = torch.full(self._shape(name, self.seqs, self.room), fill, dtype=dtype, device=self.device)

    def host(self, make: Callable[[], T]) -> list[T]:
        """Return a list on the host with an item for each sequence. Only the items change, never the list's identity.

        make: returns the item of an empty sequence. `copy.copy` of an item must not share what changes.
        """
        items = [make() for _ in range(self.seqs)]
        self._lists.append((items, make))
        return items

    def lacks(self, seqs: int, **least: int) -> bool:
        """Return whether reserve() would move tensors."""
        return seqs > self.seqs or any(size > self.room[name] for name, size in least.items())

    def reserve(self, seqs: int, **least: int) -> None:
        """Make room for `seqs` sequences and for dimensions by name, and keep the content.

        Raises KeyError for a dimension that no column has. If memory is short, nothing changes.
        """
        if not self.lacks(seqs, **least):
            return
        seqs, made = max(seqs, self.seqs), dict[str, Tensor]()
        room = self.room | {name: max(size, self.room[name]) for name, size in least.items()}
        for name, old in self.items():
            shape = self._shape(name, seqs, room)
            if shape != old.shape:
                made[name] = old.new_full(shape, self._columns[name][1])
                if old.numel():
                    made[name][tuple(slice(size) for size in old.shape)] = old
        self.update(made)
        self.seqs, self.room = seqs, room
        for items, make in self._lists:
            items += [make() for _ in range(seqs - len(items))]

    def resize(self, dimension: str, size: int) -> None:
        """Give a dimension another size, and drop the content of its columns."""
        room, columns = self.room | {dimension: size}, self._columns.items()
        those = {name: fill for name, (shape, fill) in columns if dimension in shape}
        self.update({name: self[name].new_full(self._shape(name, self.seqs, room), fill) for name, fill in those.items()})
        self.room = room

    def reorder(self, seqs: Sequence[int]) -> None:
        """Replace sequence i by the former sequence seqs[i], in place if the number of sequences stays."""
        which = torch.tensor(seqs, device=self.device)
        for name, table in self.items():
            moved = table.index_select(0, which)
            if moved.shape == table.shape:
                table.copy_(moved)
            else:
                self[name] = moved
        for items, _ in self._lists:
            items[:] = [copy(items[seq]) for seq in seqs]
        self.seqs = len(seqs)

    def export(self, seq: int, **lengths: int) -> Held:
        """Return copies of a sequence's rows and items.

        lengths: how many entries of a dimension to return, by name; all where it is not given.
        """
        cuts = {
            name: tuple(slice(lengths.get(size) if isinstance(size, str) else size) for size in shape)
            for name, (shape, _) in self._columns.items()
        }
        rows = {name: table[seq][cuts[name]].to("cpu", copy=True) for name, table in self.items()}
        return rows, [copy(items[seq]) for items, _ in self._lists]

    def load(self, seq: int, held: Held) -> None:
        """Copy what export() returned to a sequence. There must be room, and entries behind it stay."""
        rows, items = held
        for name, row in rows.items():
            self[name][seq][tuple(slice(size) for size in row.shape)].copy_(row)
        for (own, _), item in zip(self._lists, items, strict=True):
            own[seq] = copy(item)

    def clone_from(self, other: SequenceTables) -> None:
        """Take copies of the content of tables with the same columns and lists."""
        self.update({name: table.clone() for name, table in other.items()})
        self.seqs, self.room = other.seqs, dict(other.room)
        for (own, _), (items, _) in zip(self._lists, other._lists, strict=True):
            own[:] = [copy(item) for item in items]

    def _shape(self, name: str, seqs: int, room: dict[str, int]) -> tuple[int, ...]:
        return seqs, *(room[size] if isinstance(size, str) else size for size in self._columns[name][0])


class Column:
    """A class attribute that reads the column of its name from an index's `tables`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, index: TablesOnDevice, owner: type) -> Tensor:
        return index.tables[self.name]


class TablesOnDevice(Tables):
    """Data that lie in `tables`, with work on them that may be queued with other layers' work.

    first: the position where they begin.
    """

    def __init__(self, context: IndexContext) -> None:
        self.context, self.first = context, context.regions.sink
        self.tables = SequenceTables(context.device)
        self._deferred = context.deferred or DeferredBatch()

    def lengths(self, seq: int) -> dict[str, int]:
        """Return how many entries of a dimension, by name, export() copies of a sequence; all where it is not given."""
        return {}

    def make_room(self, seqs: int, tokens: int) -> None:
        self.tables.reserve(seqs)

    def clear(self, seq: int, first: int) -> None:
        """Empty a sequence, whose positions begin at `first` from now on."""
        self.truncate(seq, 0)
        self.first = first
        self.make_room(seq + 1, 0)

    def reorder(self, seqs: Sequence[int]) -> None:
        self.join()
        self.make_room(max(seqs) + 1, 0)
        self.tables.reorder(seqs)

    def export(self, seq: int) -> Held:
        self.join()
        self.make_room(seq + 1, 0)
        return self.tables.export(seq, **self.lengths(seq))

    def load(self, seq: int, held: Held, end: int) -> None:
        self.join()
        self.make_room(seq + 1, max(0, end - self.first))
        self.tables.load(seq, held)

    def join(self) -> None:
        if self in self._deferred.owners:
            self._deferred.flush()

    def tensors(self) -> list[Tensor]:
        return list(self.tables.values())

    def clone_from(self, other: Self) -> None:
        self.join()
        other.join()
        self.tables.clone_from(other.tables)
        self.first = other.first
