"""An index around another index: every change reaches both, and every question the inner one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

from torch import Tensor

from kvthaw.cache.index_api import Index, IndexContext, Selection, Tables


class AroundIndex(Index):
    """Forward every call to an inner index, and every change to the index's own tables too. A subclass changes the selection.

    own: the tables, which hold the same tokens as the inner index.
    """

    def __init__(self, context: IndexContext, inner: Index, *own: Tables) -> None:
        self.context, self.inner, self.own = context, inner, own
        self.traits, self.tested = replace(inner.traits, snapshots=False), self.tested and inner.tested

    @property
    def _all(self) -> tuple[Tables, ...]:
        return self.inner, *self.own

    def make_room(self, seqs: int, tokens: int) -> None:
        for each in self._all:
            each.make_room(seqs, tokens)

    def build(self, seq: int, first: int, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        for each in self._all:
            each.build(seq, first, keys, values, queries)

    def append(self, seqs: Sequence[int], keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        for each in self._all:
            each.append(seqs, keys, values, queries)

    def truncate(self, seq: int, length: int) -> None:
        for each in self._all:
            each.truncate(seq, length)

    def undo(self, seq: int, length: int) -> None:
        for each in self._all:
            each.undo(seq, length)

    def reorder(self, seqs: Sequence[int]) -> None:
        for each in self._all:
            each.reorder(seqs)

    def export(self, seq: int) -> Any:
        return [each.export(seq) for each in self._all]

    def load(self, seq: int, held: Any, end: int) -> None:
        for each, part in zip(self._all, held, strict=True):
            each.load(seq, part, end)

    def join(self) -> None:
        for each in self._all:
            each.join()

    def tensors(self) -> list[Tensor]:
        return [tensor for each in self._all for tensor in each.tensors()]

    def clone_from(self, other: Self) -> None:
        for mine, its in zip(self._all, other._all, strict=True):
            mine.clone_from(its)

    def select(self, query: Tensor, budget: int) -> Selection:
        return self.inner.select(query, budget)

    def unask(self) -> None:
        self.inner.unask()

    @property
    def reversible(self) -> bool:
        return self.inner.reversible

    def take_effect(self, seqs: Sequence[int]) -> None:
        self.inner.take_effect(seqs)

    def upcoming(self, seq: int) -> int:
        return self.inner.upcoming(seq)

    def work_ahead(self, seqs: Sequence[int], keys: Tensor) -> None:
        self.inner.work_ahead(seqs, keys)

    def rebuild(self, slab: Any, fetch: Tensor, slots: Tensor) -> None:
        self.inner.rebuild(slab, fetch, slots)

    def nbytes(self) -> int:
        return self.inner.nbytes() and self.inner.nbytes() + sum(
            tensor.nbytes for each in self.own for tensor in each.tensors()
        )
