"""IceCache's tree on the device: of its levels the lowest, whose nodes are all looked at."""

from __future__ import annotations

import math
from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Self, get_args

import torch
from torch import Tensor

from kvthaw.cache.index_api import IndexContext, Selection
from kvthaw.errors import at_least, one_of, proportion, within
from kvthaw.index.batches import BatchedIndex, BatchGroup, Formed
from kvthaw.index.draws import drawn
from kvthaw.index.tables import Column
from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.kmeans import grouped
from kvthaw.kernels.rerank import TILE
from kvthaw.kernels.topk import Merge, run_length, topk
from kvthaw.kernels.unit_select import choose, launch_choice
from kvthaw_baselines.kernels import node_scores
from kvthaw_baselines.kernels.nearest import nearest
from kvthaw_baselines.kernels.node_digests import node_digests, row_width
from kvthaw_baselines.kernels.stored_scores import stored_scores


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Settings of the tree on the device.

    promote: share of the keys that are promoted; each promoted key makes a node. 1 / promote is rounded to a whole number.
    outliers: number of keys in a digest that its mean describes worst, as in TreeConfig.
    spread: the score assumes a node's best key this many standard deviations above the mean, as in TreeConfig.
    field: a query group's field of view: number of rows whose keys are read. It is at least twice the number selected.
    nodes_per_batch: tokens that leave the window form this many nodes at a time, from nodes_per_batch / promote tokens.
    policy: how the query heads of a group agree, on nodes and on rows: by the largest or the mean of their softmax weights.
    """

    promote: float = 0.05
    outliers: int = 2
    spread: float = 2.0
    field: int = 1024
    nodes_per_batch: int = 16
    policy: Merge = "max"

    def __post_init__(self) -> None:
        proportion(0.5, promote=self.promote)
        within(0, 16, outliers=self.outliers)
        within(0, math.inf, spread=self.spread)
        at_least(1, field=self.field, nodes_per_batch=self.nodes_per_batch)
        one_of(get_args(Merge), policy=self.policy)

    @property
    def size(self) -> int:
        """Keys a node, in the mean."""
        return round(1 / self.promote)


class NodeIndex(BatchedIndex, tested=True):
    """Nodes of similar keys, ranked by their digests. The keys of the best nodes' rows are read, and the best rows selected.

    Exactly the share `promote` of a prompt's keys is promoted, at random. Every key belongs to the nearest promoted one:
    this is the lowest level of IceCache's tree. A device scores all nodes faster than it could descend to them, so there
    are no levels above. Tokens that leave the window later form nodes among themselves, nodes_per_batch at a time. Until
    there are enough of them, they form nodes in text order.

    A step scores the nodes, for each query head, by scale max(q.mean + spread |q| sd, q.outliers). From this it subtracts
    the log-sum-exp over all keys, each at its node's score. A node's best head (or their mean, see policy) decides. The
    rows of the best nodes, up to the field of view, get their true q.k from keys that a kernel reads on the host. The last
    node is cut. The rows with the largest softmax weight among these are selected. A sequence that fits the field of view
    is searched exactly.

    Device memory: digests and the map, (1 + outliers) D + 8 elements per node and 4 bytes per key.
    """

    wanted = Column()

    def __init__(self, context: IndexContext, config: NodeConfig | None = None) -> None:
        self.config = config or NodeConfig()
        batch, width = self.config.size * self.config.nodes_per_batch, row_width(context.head_dim, self.config.outliers)
        super().__init__(context, batch=batch, per_batch=self.config.nodes_per_batch, width=width, policy=self.config.policy)
        self.width = self._field(context.rows)
        self.tables.add("wanted", (), torch.int32)

    # Index

    def build(self, seq: int, first: int, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        self.build_prompt(seq, first, keys, -(-keys.shape[1] // self.size))

    def select(self, query: Tensor, budget: int) -> Selection:
        batch, config = query.shape[0], self.config
        self.join()
        self.reserve(batch)
        if self.width != self._field(budget):
            self.width = self._field(budget)
            self.sync_counts(range(len(self.seqs)))
        nodes, counts, order = self.looked_at(batch), self.counts[:batch], self.order
        digests, stops = self.digests[:batch, :, :nodes], self.stops[:batch, :, : nodes + 1]
        scale, scores = self.context.scale, {"scale": self.context.scale, "reach": config.spread}
        choice: dict[str, Any] = {"first": self.first, "budget": self.width, "policy": config.policy}
        if HAS_TRITON and query.is_cuda:
            found, parts = node_scores.launch(query, digests, stops, counts, **scores)
            rows, _ = launch_choice(found, parts, stops, order[:batch], counts, **choice)
        else:
            found = node_scores.definition(query, digests, stops, counts, **scores)
            rows, _ = choose(found, stops, order[:batch], counts, **choice)
        wanted, run = self.wanted[:batch], run_length(self.width, budget) or TILE
        query, store = query.to(self.context.dtype), self.context.store
        how: dict[str, Any] = {"scale": scale, "run": run, "format": store.format}
        true = stored_scores(query, self._table(), store.block_size, rows, wanted, **how)
        return Selection(*topk(true, rows, wanted, budget, 0, scale, config.policy))

    def clone_from(self, other: Self) -> None:
        super().clone_from(other)
        self.width = other.width

    @property
    def settings(self) -> Hashable:
        return self.config

    # UnitIndex

    def digest(self, keys: Tensor) -> Tensor:
        heads, tokens = keys.shape[:2]
        order = torch.arange(tokens, dtype=torch.int32, device=keys.device).expand(heads, -1)
        stops = torch.arange(0, tokens + self.size, self.size, dtype=torch.int32, device=keys.device).clamp_(max=tokens)
        return node_digests(keys, order, stops.expand(heads, -1), self.config.outliers)[0]

    def form(self, group: BatchGroup, count: int) -> Generator[None, None, Formed]:
        flat, chosen = group.keys.flatten(0, 2), drawn(group.positions, count, group.streams)
        yield
        order, stops = grouped(nearest(flat, chosen.flatten(0, 2)), count)
        yield
        digests, order = node_digests(flat, order, stops, self.config.outliers)
        return digests, order, stops

    def pieces(self, count: int) -> int:
        return 3

    def sync_counts(self, seqs: Sequence[int]) -> None:
        """See UnitIndex: how many rows of a sequence get a true score."""
        wanted = tuple(min(seq.tokens, self.width) for seq in self.seqs)
        self.wanted.copy_(self._deferred.numbers([wanted], self.wanted.device)[0])

    # Inside

    def _field(self, budget: int) -> int:
        """Rows whose keys are read for `budget` that are selected: whole tiles."""
        return -(-max(self.config.field, 2 * budget) // TILE) * TILE

    def _table(self) -> Tensor:
        store, device = self.context.store, self.context.device
        return store.table.on(device) if device.type == "cuda" else store.table.on_cpu()
