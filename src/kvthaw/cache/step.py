"""One forward of the model, as the cache counts it; facts about the next one; the buckets of lengths that captured steps serve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kvthaw.kernels.gpu import upload

_TOGETHER = 1 << 20
"""Bytes of a slot up to which several move in one launch. It copies them to new memory first."""


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
    """The new tokens of one sequence in a prefill step.

    row: the row of the step's tensors that has them.
    seq: their sequence.
    start, stop: their places in that row.
    past: tokens of the sequence before them.
    """

    row: int
    seq: int
    start: int
    stop: int
    past: int

    @property
    def places(self) -> slice:
        """Their places in the row."""
        return slice(self.start, self.stop)

    @property
    def length(self) -> int:
        """Tokens of the sequence with them."""
        return self.past + self.stop - self.start


@dataclass(eq=False, slots=True)
class Step:
    """One forward that gives `tokens` new tokens to every sequence, or to some. `Sequences.commit` counts it.

    start: tokens before it, padding included.
    parts: sequences and their new tokens, one after the other in the one row of the step's tensors. Several have no earlier
        tokens. Empty: all sequences, a row each.
    left_pad: padding of each sequence.
    dense: every query attends to all tokens; else tokens are decoded one by one.
    remaining: tokens of the announced prompt after this step.
    """

    start: int
    tokens: int
    left_pad: tuple[int, ...]
    idle: frozenset[int]
    parts: tuple[tuple[int, int], ...] = ()
    dense: bool = True
    remaining: int = 0
    _ends: Tensor | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence of the step at the end of its prompt."""
        if self.parts:
            return self.start + max(tokens for _, tokens in self.parts) + self.remaining
        return self.start + self.tokens + self.remaining - min(self.left_pad, default=0)

    def packs(self, queries: int) -> bool:
        """Return whether `queries` queries are the whole prompts of several sequences, in one row."""
        return len(self.parts) > 1 and queries == self.tokens

    def ends(self, device: torch.device) -> Tensor:
        """Return the prefix sums of the lengths of its prompts, which share one row: [prompts + 1] int32, 0 first."""
        if self._ends is None:
            self._ends = upload([0, *accumulate(tokens for _, tokens in self.parts)], torch.int32, device)
        return self._ends

    def has(self, seq: int) -> bool:
        """Return whether a sequence gets tokens in this step."""
        return not self.parts or any(seq == own for own, _ in self.parts)

    def rows(self) -> Iterator[Row]:
        """Yield the new tokens of each sequence that has any besides padding."""
        at = 0
        for seq, tokens in self.parts:
            yield Row(0, seq, at, at + tokens, self.start)
            at += tokens
        if self.parts:
            return
        for seq, left in enumerate(self.left_pad):
            pad = min(self.tokens, max(0, left - self.start))
            if pad < self.tokens:
                yield Row(seq, seq, pad, self.tokens, max(0, self.start - left))

    def lengths(self, taken: int) -> list[int]:
        """Return the length of every sequence after `taken` tokens of a step for all sequences."""
        total = self.start + taken
        return [0 if seq in self.idle else max(0, total - left) for seq, left in enumerate(self.left_pad)]


class Moves:
    """Sequences that move to empty slots.

    slots: the new slot of each sequence.
    """

    def __init__(self, slots: Mapping[int, int]) -> None:
        self.slots = dict(slots)
        self._on = dict[torch.device, tuple[Tensor, Tensor]]()  # former and new slots, [n] int64 each

    def copy(self, x: Tensor) -> None:
        """Copy what x [slots, ...] has of the sequences to their new slots."""
        if x[0].nbytes > _TOGETHER:
            for seq, to in self.slots.items():
                x[to].copy_(x[seq])
            return
        if x.device not in self._on:
            before, after = upload([*zip(*self.slots.items(), strict=True)], torch.int64, x.device).unbind()
            self._on[x.device] = before, after
        before, after = self._on[x.device]
        x.index_copy_(0, after, x.index_select(0, before))


@dataclass(slots=True)
class Known:
    """What is known of the next step. Every change of the sequences but decoded tokens makes it void.

    full: the padded length at which the next ring is full; -1: unknown.
    placed: what the device's lengths are set to, a step and its token, or a padded length and the device.
    prepared: the capacity for which layers have done their host work, and whether blocks spilled then.
    flushed: the padded length at which all tokens that leave rings are stored and indexed; -1: unknown.
    crossing: the padded length at which the tokens are too many for full attention.
    """

    full: int = -1
    placed: tuple[Step | int, int | torch.device] | None = None
    prepared: tuple[int, bool] | None = None
    flushed: int = -1
    crossing: int | None = None


LEAST, RATIO = 2048, 4
"""Tokens of the smallest bucket, and the ratio of each bucket to the one before. Few captures serve all lengths."""


def buckets(capacity: int) -> list[int]:
    """Return all buckets of a capacity."""
    found = [LEAST]
    while found[-1] < capacity:
        found.append(found[-1] * RATIO)
    return [*found[:-1], capacity]


def bucket(longest: int, capacity: int) -> int:
    """Return the smallest bucket that holds `longest` tokens. The last bucket is the capacity."""
    return next((size for size in buckets(capacity) if size >= longest), capacity)


def roomier(have: int, need: int) -> int:
    """Return a new capacity of at least `need` tokens: `need` and a margin at first, later at least 1.5 times `have`."""
    return need + max(256, need // 16) if have == 0 else max(need, have * 3 // 2)
