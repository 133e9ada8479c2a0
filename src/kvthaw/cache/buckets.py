"""How many tokens there is room for, and buckets of lengths below that: a captured step serves sequences no longer than its bucket.

Kernels read from the device how long sequences are. What is fixed with a launch, grids, splits and the width of what is selected
among, must hold the longest that the capture is replayed for: where that is the capacity, sequences of 1k tokens pay for 128k.
"""

from __future__ import annotations

LEAST, RATIO = 2048, 4
"""Tokens of the smallest bucket, and of each of the others in those of the one before: few captures serve all lengths."""


def buckets(capacity: int) -> list[int]:
    """Return all buckets of a capacity."""
    found = [LEAST]
    while found[-1] < capacity:
        found.append(found[-1] * RATIO)
    return [*found[:-1], capacity]


def bucket(longest: int, capacity: int) -> int:
    """Return the tokens of the smallest bucket that holds `tokens`. The last bucket is the capacity."""
    return next((size for size in buckets(capacity) if size >= longest), capacity)


def roomier(have: int, need: int) -> int:
    """Return a capacity of at least `need` tokens: a little more than a first prompt, later at least half as much again."""
    return need + max(256, need // 16) if have == 0 else max(need, have * 3 // 2)
