"""Capacities of sequences, and buckets of lengths below them: a captured step serves sequences no longer than its bucket.

Kernels read the lengths of sequences from the device. A launch fixes its grid, its splits and the number of candidates,
which must suffice for the longest sequence of any replay. Captured for the whole capacity, a step of 1k tokens would take
as long as one of 128k.
"""

from __future__ import annotations

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
