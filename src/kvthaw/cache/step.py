"""One forward of the model, as the cache counts it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class Held:
    """Tokens attended in sink and ring, summed for statistics.

    tokens: decoded tokens.
    steps: decoded tokens, counted per sequence.
    total: tokens attended over all steps.
    most: the most in one step.
    """

    tokens: int = 0
    steps: int = 0
    total: int = 0
    most: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a prefill step.

    row: its index in the step's tensors.
    seq: its sequence.
    pad: how many of the step's tokens are padding.
    past: tokens of the sequence before them.
    """

    row: int
    seq: int
    pad: int
    past: int


@dataclass(eq=False, slots=True)
class Step:
    """One forward that gives every sequence, or only sequence `seq`, `tokens` new tokens. `Sequences.commit` counts it.

    start: tokens before it, padding included.
    left_pad: padding of each sequence.
    dense: every query attends to all tokens; else tokens are decoded one by one.
    remaining: tokens of the announced prompt after this step.
    retaken: it repeats the step before it, which failed.
    """

    start: int
    tokens: int
    left_pad: tuple[int, ...]
    idle: frozenset[int]
    seq: int | None = None
    dense: bool = True
    remaining: int = 0
    retaken: bool = False

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence of the step at the end of its prompt."""
        return self.start + self.tokens + self.remaining - (0 if self.seq is not None else min(self.left_pad, default=0))

    def rows(self) -> Iterator[Row]:
        """Yield the rows that have tokens besides padding."""
        if self.seq is not None:
            yield Row(0, self.seq, 0, self.start)
            return
        for seq, left in enumerate(self.left_pad):
            pad = min(self.tokens, max(0, left - self.start))
            if pad < self.tokens:
                yield Row(seq, seq, pad, max(0, self.start - left))

    def lengths(self, taken: int) -> list[int]:
        """Return the length of every sequence after `taken` tokens of a step for all sequences."""
        total = self.start + taken
        return [0 if seq in self.idle else max(0, total - left) for seq, left in enumerate(self.left_pad)]

    def repeats(self, other: Step) -> bool:
        """Return whether this step decodes the token that `other` decoded."""
        return not (self.dense or other.dense) and self.tokens == other.tokens == 1 and self.start == other.start
