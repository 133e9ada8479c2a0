"""What the host knows of a sequence's units."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor


@dataclass(slots=True)
class Seq:
    """Counts of a sequence on the host.

    tokens, units: in its tables.
    kept: how many of the last tokens' keys are kept, at most a batch.
    marks: (tokens, units) before each batch, or before several batches that came together.
    """

    tokens: int = 0
    units: int = 0
    kept: int = 0
    marks: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])

    def begin_anew(self, batch: int) -> None:
        """Start a new batch if the last one is full or was cut.

        batch: the most tokens of a batch.
        """
        if self.kept in (0, batch) and self.marks[-1] != (self.tokens, self.units):
            self.marks.append((self.tokens, self.units))
            self.kept = 0

    def take(self, n: int, size: int, batch: int) -> list[tuple[int, int]]:
        """Count n more tokens of the last batch and of those behind it. (tokens, units) before each batch that is full now."""
        begin, before = self.marks[-1]
        n += self.kept
        last, per = (n - 1) // batch, batch // size
        starts = [(begin + i * batch, before + i * per) for i in range(last + 1)]
        if batch > size:
            self.marks += starts[1:]
        elif last:
            self.marks.append(starts[-1])
        self.kept = n - last * batch
        self.tokens, self.units = begin + n, before + -(-n // size)
        return starts[: n // batch]

    def __copy__(self) -> Seq:
        return replace(self, marks=list(self.marks))


@dataclass(frozen=True, slots=True)
class Before:
    """A sequence before its last append: its tokens, units and kept keys, the number of its marks, and overwritten data.

    An append adds marks and changes none. Overwritten data that cannot be recomputed is kept as (table, first place, [H, n,
    ...]).
    """

    tokens: int
    units: int
    kept: int
    marks: int
    parts: tuple[tuple[str, int, Tensor], ...]

    def copy(self) -> Before:
        """Return a copy."""
        return replace(self, parts=tuple((name, start, part.clone()) for name, start, part in self.parts))
