"""Small statistics over samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

CHAT = ("chat", "system", "thinking")
"""Fields for the form of a prompt; None if not given."""


def paired(gaps: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of differences between pairs, and a 95 % interval around it.

    The interval is Agresti and Min's (2005): two pseudo-pairs are added, so that equal scores do not pass for certainty.
    """
    return paired_sums(len(gaps), sum(gaps), sum(gap * gap for gap in gaps))


def paired_sums(n: int, total: float, squares: float) -> tuple[float, float, float]:
    """Return what `paired` does of n differences, from their sum and the sum of their squares."""
    middle = total / (n + 2)
    spread = 1.959964 * math.sqrt(((squares + 1) / (n + 2) - middle * middle) / (n + 2))
    return total / n, max(-1.0, middle - spread), min(1.0, middle + spread)


def wilson(share: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's interval, 95 % by default, around a share of n trials. Nothing is known of n = 0: (0, 1)."""
    if n == 0:
        return 0.0, 1.0
    spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    middle, scale = share + z * z / (2 * n), 1 + z * z / n
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)
