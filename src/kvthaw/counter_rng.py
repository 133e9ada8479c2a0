"""Counter-based random numbers (splitmix64): each value is a pure function of its int64 counter, so there is no state to keep."""

from __future__ import annotations

from torch import Tensor

# The constants of splitmix64 as signed integers.
GOLDEN, SPREAD, _LAST = -7046029254386353131, -4658895280553007687, -7723592293110705685


def mix(x: Tensor) -> Tensor:
    """Hash int64 to int64 with the finalizer of splitmix64, a bijection in which every output bit depends on every input bit."""
    for shift, factor in ((30, SPREAD), (27, _LAST)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def gumbel(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Return Gumbel noise [B, N], float64: -log(-log(u)), where u in (0, 1) is a hash of (seed, position, token).

    seeds, positions [B], tokens [B, N] or [1, N]: int64.
    """
    salt = mix(mix(seeds * SPREAD + 1) + positions * GOLDEN)
    bits = (mix(salt[:, None] + tokens * GOLDEN) >> 11) & ((1 << 53) - 1)
    return -(-((bits.double() + 0.5) / ((1 << 53) + 2)).log()).log()  # 2 more, for 2^53 - 1/2 rounds to 2^53
