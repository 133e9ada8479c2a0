"""One layer of a method alone, and the attention that its tokens pay, in float64: for tests of methods that watch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvthaw.cache.choice import Choice
from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.layer_base import AttentionParams
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.cache.plan import Settings
from kvthaw.methods import resolve

SCALE = 0.4


class OneLayer:
    """A prompt and the steps after it, of random queries, keys and values, or of those given; one sequence."""

    def __init__(
        self,
        method: str,
        prompt: int,
        steps: int,
        *,
        heads: int = 2,
        group: int = 2,
        dim: int = 16,
        budget: int | None = 64,
        retrieved: int | None = None,
        dtype: torch.dtype = torch.float32,
        given: tuple[Tensor, Tensor, Tensor] | None = None,
        scale: float = SCALE,
        **options: Any,
    ) -> None:
        total = prompt + steps
        self.heads, self.group, self.prompt, self.scale = heads, group, prompt, scale
        if given is None:
            query = torch.randn(1, heads * group, total, dim, dtype=dtype)
            given = query, *torch.randn(2, 1, heads, total, dim, dtype=dtype)
        self.query, self.keys, self.values = given
        settings = Settings(resolve(method, **options), budget=budget, retrieved=retrieved, block_size=32)
        self.cache = KVCache(settings, [2], 3)
        self.cache.streams.observers.append(self._see)
        self.choice: Choice | None = None
        self.out = self.take(0, prompt)

    @property
    def layer(self) -> OffloadedLayer:
        return self.cache.offloaded[0]

    @property
    def length(self) -> int:
        """Tokens so far."""
        return self.cache.sequences.padded_length

    def _see(self, layer: OffloadedLayer, query: Tensor, choice: Choice | None) -> None:
        self.choice = choice

    def take(self, start: int, stop: int) -> Tensor:
        """Tokens start .. stop, [Hq, n, D]."""
        q, k, v = (x[:, :, start:stop] for x in (self.query, self.keys, self.values))
        return self.cache.attend(self.layer, q, k, v, AttentionParams(self.scale))[0]

    def step(self) -> list[set[int]]:
        """The next token; the rows that were chosen for it, of each KV head."""
        at = self.length
        self.out = self.take(at, at + 1)
        assert self.choice is not None
        return [set(rows.tolist()) - {-1} for rows in self.choice.selection.rows[0]]

    def weights(self, at: int, visible: list[set[int]] | None = None) -> Tensor:
        """Softmax weights of the token at a place, [H, G, at + 1] float64: over all tokens up to it, or over some for each head."""
        q = self.query[0, :, at].double().view(self.heads, self.group, -1)
        scores = q @ self.keys[0, :, : at + 1].double().transpose(1, 2) * self.scale
        if visible is not None:
            for head, some in enumerate(visible):
                hidden = torch.tensor(sorted(set(range(at + 1)) - some), dtype=torch.int64)
                scores[head, :, hidden] = -torch.inf
        return torch.softmax(scores, dim=2)
