"""The settings of a DCI-tree, and its random directions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from kvthaw.errors import ConfigError, at_least, one_of, proportion, within

_MASK = (1 << 64) - 1
Promotion = Literal["random", "in_order"]
Descend = Literal["node", "level", "digest"]
Unit = Literal["page", "token"]
Merge = Literal["union", "share", "each"]
Answers = Literal["measured", "best"]


@dataclass(frozen=True, slots=True)
class TreeConfig:
    """Settings of a DCI-tree. The defaults are the paper's; ours if it gives no number.

    promote: the ratio r of one level's number of points to the next lower level's.
    promote_higher: the ratio from level 2 on; 0: the same, as in the paper.
    promotion: "random", or "in_order" (every ceil(1 / r)-th point, as the authors' code).
    page_size: slots of a page.
    composites, simples: P-DCI has `composites` composite indices with `simples` simple ones each.
    descend: the points from which a query descends. "node": the k best of every visited node (algorithm 4). "level": the
        best of a level (the authors' field of view). "digest": also the best of a level, ranked by the
        estimated best key below each point: the largest of its node's outliers and of mean + spread, see
        native/tree_digest.cpp.
    query_beam, query_beam_share: a query descends from max(query_beam, query_beam_share * n) points of a node or level. The
        minimum is one point for each page of the budget, or two with levels.
    query_retrieve_share: the share of a node's points, nearest in projection, for which P-DCI computes the true distance.
    retrieve_batch: points of a batch. P-DCI stops only after whole batches.
    insert_beam, insert_retrieve_share: the same for inserting a key, which descends from insert_beam points of a level (the
        paper: 1).
    build_beam, build_retrieve_share: the same for indexing a prompt. build_beam=0 compares with every point of the level
        above.
    outliers: number of keys that a digest lists because its mean describes them worst.
    spread: standard deviations above the mean at which the best key of a node is expected.
    unit: the unit of a selection. "page": whole pages of the best tokens (algorithm 3). "token": only the best tokens
        (algorithm 4's own answer). A store that fetches single rows then need not fetch a page's other tokens.
    answers: the points that a selection ranks. "measured": all points with a true distance. "best": the points of every
        node from which a query may descend, as algorithm 4 does. It requires descend="node".
    merge: how the query heads of one KV head share the budget. "union": all points that the heads found, or each head's
        best in turn if these exceed the budget. "share": by the best score, which is q.k times the attention's scale minus
        the head's log-sum-exp over its points. "each": every head selects its own equal share of the budget. All heads
        attend to the whole union, as in the paper, where the budget is per query head.
    seed: seed of promotions and directions.
    """

    promote: float = 0.05
    promote_higher: float = 0.0
    promotion: Promotion = "random"
    page_size: int = 16
    composites: int = 1
    simples: int = 4
    descend: Descend = "node"
    query_beam: int = 16
    query_beam_share: float = 0.0
    query_retrieve_share: float = 0.9
    retrieve_batch: int = 16
    insert_beam: int = 1
    insert_retrieve_share: float = 0.9
    build_beam: int = 1
    build_retrieve_share: float = 0.9
    outliers: int = 2
    spread: float = 2.0
    unit: Unit = "page"
    answers: Answers = "measured"
    merge: Merge = "union"
    seed: int = 0

    def __post_init__(self) -> None:
        proportion(0.5, promote=self.promote)
        within(0, 0.5, promote_higher=self.promote_higher)
        within(1, 256, page_size=self.page_size, retrieve_batch=self.retrieve_batch)
        within(1, 16, composites=self.composites, simples=self.simples)
        at_least(1, query_beam=self.query_beam, insert_beam=self.insert_beam)
        at_least(0, build_beam=self.build_beam)
        within(0, 1, query_beam_share=self.query_beam_share)
        proportion(query_retrieve_share=self.query_retrieve_share, insert_retrieve_share=self.insert_retrieve_share)
        proportion(build_retrieve_share=self.build_retrieve_share)
        within(0, 16, outliers=self.outliers)
        within(0, math.inf, spread=self.spread)
        for name, allowed in CHOICES.items():
            one_of(allowed, **{name: getattr(self, name)})
        if self.answers == "best" and self.descend != "node":
            raise ConfigError(f"answers is 'best' and descend is {self.descend!r}; it must be 'node'")
        within(0, (1 << 63) - 1, seed=self.seed)

    @property
    def ratios(self) -> tuple[float, float]:
        """Of level 2 to level 1, and of each higher level to the one below."""
        return self.promote, self.promote_higher or self.promote


CHOICES = {
    "promotion": get_args(Promotion),
    "descend": get_args(Descend),
    "unit": get_args(Unit),
    "answers": get_args(Answers),
    "merge": get_args(Merge),
}


def splitmix64(x: int) -> int:
    """One step of splitmix64: a bijection of 64-bit numbers that mixes well."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def directions(config: TreeConfig, layer: int, head: int, head_dim: int) -> Tensor:
    """[composites * simples, head_dim + 1] float32: random unit vectors, the simple indices of a composite one together."""
    seed = splitmix64(splitmix64(splitmix64(config.seed + 1) ^ layer) ^ head) >> 1
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(config.composites * config.simples, head_dim + 1, generator=generator, dtype=torch.float64)
    units: Tensor = draws / draws.norm(dim=1, keepdim=True)
    return units.float()
