"""How many keys collide and how many become candidates, by the length of the retrieval region."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvthaw.errors import ConfigError, at_least, proportion

TIERS = (0.05, 0.15, 0.30, 0.50, 0.75, 1.0)
"""Where the tiers end, within the top rho (appendix B.2.1)."""
TABLE = ((5_000, 0.5, 0.5), (10_000, 0.3, 0.25), (30_000, 0.25, 0.2), (None, 0.2, 0.1))
"""(regions shorter than this, rho, beta), of ParisKV's authors' code. The paper says 5 to 10 % for beta, more for
short contexts, and rho >= beta."""
LONG = 1 << 17
"""The region from which on `growth` applies."""


@dataclass(frozen=True, slots=True)
class Ratios:
    """rho: share of the keys that collide in a subspace.

    beta: share that become candidates; None: by region length, as in TABLE.
    candidates: a fixed number of candidates instead of beta.
    tiered: six tiers of votes, or one.
    least: candidates for each selected row, at least.
    growth: from LONG keys on the number of candidates grows with this power of the region's length. Raises ConfigError.
    """

    rho: float | None = None
    beta: float | None = None
    candidates: int | None = None
    tiered: bool = True
    least: int = 1
    growth: float = 1.0

    def __post_init__(self) -> None:
        proportion(**{name: share for name, share in (("rho", self.rho), ("beta", self.beta)) if share is not None})
        if self.candidates is not None:
            if self.beta is not None:
                raise ConfigError(f"beta is {self.beta} and candidates is {self.candidates}; give one of them")
            at_least(1, candidates=self.candidates)
            return
        for _, rho, beta in TABLE:
            rho, beta = self.rho or rho, self.beta or beta
            if rho < beta:
                other = "" if self.rho and self.beta else "; give both where the default of the other does not fit"
                raise ConfigError(f"rho is {rho} and beta is {beta}; rho must be at least beta{other}")

    def limits(self, length: int) -> list[int]:
        """Return the number of keys at which each of the six tiers ends; without tiers all are 0 except the last."""
        rho = self.rho or next(rho for end, rho, _ in TABLE if end is None or length < end)
        ends = [_ceil(share * rho * length) for share in TIERS]
        return ends if self.tiered else [0] * 5 + ends[-1:]

    def wanted(self, length: int, k: int) -> int:
        """Return the number of candidates for a region of `length` keys: at least `least` per row for k rows, and at most all
        keys."""
        if self.candidates is not None:
            return min(length, self.candidates)
        beta = self.beta or next(beta for end, _, beta in TABLE if end is None or length < end)
        effective = length if length <= LONG else LONG * (length / LONG) ** self.growth
        return min(length, max(self.least * k, _ceil(beta * effective)))

    def most(self, capacity: int, k: int) -> int:
        """Return the largest `wanted` of any length up to capacity."""
        ends = {min(end - 1, capacity) for end, _, _ in TABLE if end is not None}
        return max(self.wanted(length, k) for length in ends | {capacity})


def _ceil(x: float) -> int:
    return math.ceil(x - 1e-9)
