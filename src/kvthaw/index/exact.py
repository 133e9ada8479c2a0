"""An index that computes every score. Keys stay on the device; graph-safe within a capacity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from kvthaw.errors import ConfigError
from kvthaw.types import LayerShape, Selection

Policy = Literal["max", "mean", "mean_query"]


class ExactIndex:
    """Exact top-k by attention weight.

    With G query heads on a KV head the heads' choices become one by `policy`: the largest or the mean of their softmax weights over
    the indexed keys, or the score of their mean query. keys [B, H, capacity, D] doubles when it is full.
    """

    graph_safe = True
    on_host = False

    def __init__(self, shape: LayerShape, *, policy: Policy = "max") -> None:
        if policy not in get_args(Policy):
            raise ConfigError(f"policy is {policy!r}; it must be one of {', '.join(get_args(Policy))}")
        self.shape, self.policy = shape, policy
        self.scale = shape.scale
        self._first = shape.regions.sink
        self._keys = torch.zeros((0, shape.kv_heads, 0, shape.head_dim), dtype=shape.dtype, device=shape.device)
        self._counts: list[int] = []
        self._known = torch.zeros(0, dtype=torch.int64, device=shape.device)  # the same on the device

    def build(self, lane: int, first: int, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        """See Index."""
        self.truncate(lane, 0)
        self._first = first
        self.append([lane], keys[None], values[None], None)

    def append(self, lanes: Sequence[int], keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        """See Index."""
        n = keys.shape[2]
        self._counts += [0] * (max(lanes) + 1 - len(self._counts))
        self._reserve(max(self._counts[lane] for lane in lanes) + n)
        for i, lane in enumerate(lanes):
            start = self._counts[lane]
            self._keys[lane, :, start : start + n] = keys[i]
            self._counts[lane] = start + n
        self._tell()

    def select(self, query: Tensor, budget: int) -> Selection:
        """See Index."""
        batch, heads = query.shape[0], self.shape.kv_heads
        if batch > len(self._counts):
            self._counts += [0] * (batch - len(self._counts))
            self._reserve(max(self._counts))
            self._tell()
        grouped = query.reshape(batch, heads, -1, self.shape.head_dim)
        if self.policy == "mean_query":
            grouped = grouped.float().mean(dim=2, keepdim=True).to(query.dtype)
        scores = (grouped @ self._keys.transpose(2, 3)).float() * self.scale  # [B, H, G, capacity]
        counts = self._known
        known = torch.arange(scores.shape[3], device=query.device) < counts[:, None]
        scores = scores.masked_fill(~known[:, None, None], -torch.inf)
        # in logs, so that a weight too small for float32 still has its rank
        weights = torch.log_softmax(scores, dim=3).masked_fill(~known[:, None, None], -torch.inf)
        merged = weights.amax(dim=2) if self.policy == "max" else torch.logsumexp(weights, dim=2)
        rows = torch.full((batch, heads, budget), -1, dtype=torch.int32, device=query.device)
        k = min(budget, scores.shape[3])
        top = torch.topk(merged, k, dim=2)
        rows[:, :, :k] = torch.where(top.values > -torch.inf, top.indices + self._first, -1).int()
        return Selection(rows, counts.clamp(max=budget).int()[:, None].expand(-1, heads).contiguous())

    def truncate(self, lane: int, length: int) -> None:
        """See Index."""
        if lane < len(self._counts):
            self._counts[lane] = min(self._counts[lane], max(0, length - self._first))
            self._tell()

    def reorder(self, lanes: Sequence[int]) -> None:
        """See Index."""
        self._counts += [0] * (max(lanes) + 1 - len(self._counts))
        self._reserve(max(self._counts))
        self._keys = self._keys[torch.tensor(lanes, device=self._keys.device)]
        self._counts = [self._counts[lane] for lane in lanes]
        self._tell()

    def state_dict(self) -> dict[str, Any]:
        """See Index."""
        return {"keys": self._keys.clone(), "counts": list(self._counts), "first": self._first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Index."""
        self._keys, self._counts, self._first = state["keys"].clone(), list(state["counts"]), state["first"]
        self._tell()

    def _tell(self) -> None:
        if len(self._known) != len(self._counts):
            self._known = torch.empty(len(self._counts), dtype=torch.int64, device=self.shape.device)
        self._known.copy_(torch.tensor(self._counts, dtype=torch.int64), non_blocking=True)

    def _reserve(self, length: int) -> None:
        lanes, heads, have, dim = self._keys.shape
        if length > have or len(self._counts) > lanes:
            capacity = have if length <= have else max(length, 2 * have, 64)
            grown = self._keys.new_zeros((len(self._counts), heads, capacity, dim))
            grown[:lanes, :, :have] = self._keys
            self._keys = grown
