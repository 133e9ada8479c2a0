"""The settings of a DCI-tree, and what it draws at random: levels and directions, from seed, layer, head and position."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvthaw.errors import ConfigError

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class TreeConfig:
    """Settings of a DCI-tree.

    promote, promote_higher: a point is at level >= 2 with probability promote, and at each further one with promote_higher
        times the one before. The paper has one ratio r for both.
    page_size: slots of a page.
    composites, simples: P-DCI keeps `composites` composite indices of `simples` simple ones each.
    query_beam, query_beam_share: a query descends from the best max(query_beam, query_beam_share * n) points of a level (the
        authors' field of view, 30 and 0.0015 in their code), and from no fewer than two for each page that the budget holds.
    descend: what makes a point the better one to descend from. "point": the point itself, near to the query (algorithm 4).
        "digest": the best that may lie below it, which a query finds at a tenth of the effort: the largest of its node's
        outliers and of mean + spread, see native/tree_digest.cpp.
    outliers: how many keys a digest names that its mean describes worst. spread: how many standard deviations above the mean a
        key of a node is looked for.
    query_retrieve_share: the share of a node's points, those nearest in projection, that get a true distance. The authors' code
        retrieves 0.8 (0.6 to insert); every level then loses that share of what it should have found.
    insert_beam, insert_retrieve_share: the same for the searches that insert a key. Building needs none: it finds every
        nearest parent.
    unit: what a selection is made of. "page": the pages of the best tokens, whole (algorithm 3). "token": those tokens alone
        (algorithm 4's own answer): a store that fetches single rows need not bring a page's other tokens.
    merge: how the query heads of one KV head share the budget. "interleave" takes their ranked units in turn, "union" all units
        by their best score, a score being q.k times the attention's scale less the head's own log-sum-exp over what it saw.
    seed: of promotions and directions.
    """

    promote: float = 0.05
    promote_higher: float = 0.2
    page_size: int = 16
    composites: int = 1
    simples: int = 1
    query_beam: int = 64
    query_beam_share: float = 0.001
    descend: str = "digest"
    outliers: int = 2
    spread: float = 2.0
    query_retrieve_share: float = 1.0
    insert_beam: int = 20
    insert_retrieve_share: float = 1.0
    unit: str = "page"
    merge: str = "union"
    seed: int = 0

    def __post_init__(self) -> None:
        def need(name: str, ok: bool, allowed: str) -> None:
            if not ok:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be {allowed}")

        for name in ("promote", "promote_higher"):
            need(name, 0.0 < getattr(self, name) <= 0.5, "above 0 and at most 0.5")
        need("page_size", 1 <= self.page_size <= 256, "from 1 to 256")
        for name in ("composites", "simples"):
            need(name, 1 <= getattr(self, name) <= 16, "from 1 to 16")
        for name in ("query_beam", "insert_beam"):
            need(name, getattr(self, name) >= 1, "at least 1")
        need("query_beam_share", 0.0 <= self.query_beam_share <= 1.0, "from 0 to 1")
        for name in ("query_retrieve_share", "insert_retrieve_share"):
            need(name, 0.0 < getattr(self, name) <= 1.0, "above 0 and at most 1")
        need("descend", self.descend in ("point", "digest"), "'point' or 'digest'")
        need("outliers", 0 <= self.outliers <= 16, "from 0 to 16")
        need("spread", 0.0 <= self.spread < math.inf, "finite and at least 0")
        need("unit", self.unit in ("page", "token"), "'page' or 'token'")
        need("merge", self.merge in ("interleave", "union"), "'interleave' or 'union'")
        need("seed", 0 <= self.seed < 1 << 63, "from 0 to 2^63 - 1")

    def beam(self, points: int, budget: int) -> int:
        """How many points of a level a query descends from."""
        return max(self.query_beam, math.ceil(self.query_beam_share * points), -(-2 * budget // self.page_size))


def splitmix64(x: int) -> int:
    """One step of splitmix64: a bijection of 64-bit numbers that mixes well."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def draw_level(config: TreeConfig, layer: int, head: int, position: int) -> int:
    """The level of a position, from 1: a pure function, so that a sequence alone equals the sequence in a batch. No more than
    32."""
    x = splitmix64(splitmix64(splitmix64(splitmix64(config.seed) ^ layer) ^ head) ^ position)
    uniform = (x >> 11) * 2.0**-53
    level, threshold = 1, config.promote
    while uniform < threshold and level < 32:
        level, threshold = level + 1, threshold * config.promote_higher
    return level


def directions(config: TreeConfig, layer: int, head: int, head_dim: int) -> Tensor:
    """[composites * simples, head_dim + 1] float32: random unit vectors, the simple indices of a composite one together."""
    seed = splitmix64(splitmix64(splitmix64(config.seed + 1) ^ layer) ^ head) >> 1
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(config.composites * config.simples, head_dim + 1, generator=generator, dtype=torch.float64)
    units: Tensor = draws / draws.norm(dim=1, keepdim=True)
    return units.float()
