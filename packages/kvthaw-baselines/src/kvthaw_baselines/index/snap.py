"""SnapKV's choice: the tokens that a prompt's last queries attend to, once or again and again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Self, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from kvthaw.cache.index_api import IndexContext, Selection
from kvthaw.errors import ConfigError, at_least, one_of
from kvthaw.index.tables import Held
from kvthaw_baselines.index.kept import Agree, KeptIndex, observed

Pooling = Literal["avg", "max"]


class SnapIndex(KeptIndex, tested=True):
    """SnapKV: the tokens that the prompt's last queries attend to, and their neighbours.

    The scores of `observed` over an observation window of the prompt's last `width` tokens (no more than the window), pooled over
    `kernel` neighbours. Tokens that leave the ring later stay while there is room.
    """

    def __init__(
        self, context: IndexContext, *, width: int = 32, kernel: int = 7, pooling: Pooling = "avg", agree: Agree = "mean"
    ) -> None:
        one_of(get_args(Pooling), pooling=pooling)
        if kernel < 1 or kernel % 2 == 0:
            raise ConfigError(f"kernel is {kernel}; it must be odd and at least 1")
        at_least(1, width=width)
        super().__init__(context, agree=agree)
        self.width, self.kernel, self.pooling = min(width, context.regions.window), kernel, pooling

    def observe(self, seq: int, queries: Tensor, keys: Tensor, tokens: int) -> Tensor:
        mass = observed(queries[:, :, -self.width :], keys, scale=self.context.scale, agree=self.agree)[:, :tokens]
        pool = F.avg_pool1d if self.pooling == "avg" else F.max_pool1d
        return pool(mass, self.kernel, stride=1, padding=self.kernel // 2)

    def arrive(self, seq: int, start: int, stop: int) -> Tensor:
        """See KeptIndex. Less than any token of the prompt has."""
        return torch.full((self.context.kv_heads, stop - start), -1.0, device=self.context.device)


class FreshSnapIndex(SnapIndex, tested=True):
    """SnapKV's choice, repeated every `interval` tokens with the last queries, from all tokens.

    The window's keys are on the device already. The other keys are read from the host between two steps.
    """

    traits = replace(SnapIndex.traits, evicts=False, remembers=True)

    def __init__(self, context: IndexContext, *, interval: int = 128, **options: Any) -> None:
        at_least(1, interval=interval)
        super().__init__(context, **options)
        self.interval = interval
        self.tables.add("recent", (context.q_heads, self.width, context.head_dim), context.dtype)
        self.cursor = torch.zeros(1, dtype=torch.int64, device=context.device)  # counts steps; a captured one counts on
        self.since = self.tables.host(int)

    def select(self, query: Tensor, budget: int) -> Selection:
        selection = super().select(query, budget)
        slot = self.cursor % self.width
        if self.context.sequences is not None:  # a sequence without a token asks nothing
            query = torch.where(self.context.sequences.on_device.live[: len(query), None, None] > 0, query, 0.0)
        self.tables["recent"][: query.shape[0]].index_copy_(2, slot, query[:, :, None].to(self.context.dtype))
        self.cursor.add_(1)
        return selection

    def observe(self, seq: int, queries: Tensor, keys: Tensor, tokens: int) -> Tensor:
        self.since[seq] = 0
        last = queries.flatten(0, 1)[:, -self.width :]
        slots = (self.cursor + torch.arange(-last.shape[1], 0, device=keys.device)) % self.width
        self.tables["recent"][seq].index_copy_(1, slots, last.to(self.context.dtype))
        return super().observe(seq, queries, keys, tokens)

    def append(self, seqs: Sequence[int], keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        super().append(seqs, keys, values, queries)
        slab, n = self.context.slab, keys.shape[2]
        for seq in seqs:
            self.since[seq] += n
            if queries is None and self.since[seq] >= self.interval and slab is not None:
                stop = self.first + self.tokens[seq]
                behind = slab.read(seq, stop, stop - n + self.context.regions.ring)[:, :, 0]  # the ring is full
                self.choose_again(seq, self.tables["recent"][seq].index_select(1, self._oldest_first()), behind)

    def truncate(self, seq: int, length: int) -> None:
        super().truncate(seq, length)
        if seq < len(self.tokens) and not self.tokens[seq]:
            self.since[seq] = 0
            self.tables["recent"][seq].zero_()

    def unask(self) -> None:
        """See Index: the next queries take the places of the last ones."""
        self.cursor.sub_(1)

    def export(self, seq: int) -> Held:
        """Return the last queries from the oldest on, because the step count continues meanwhile; see Tables."""
        held = super().export(seq)
        held[0]["recent"] = self.tables["recent"][seq].index_select(1, self._oldest_first()).cpu()
        return held

    def load(self, seq: int, held: Held, end: int) -> None:
        super().load(seq, held, end)
        last = self.tables["recent"][seq]
        last.index_copy_(1, self._oldest_first(), last.clone())

    def _oldest_first(self) -> Tensor:
        """Return the places of the last queries, from the oldest on."""
        return (self.cursor + torch.arange(self.width, device=self.cursor.device)) % self.width

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), self.cursor]

    def clone_from(self, other: Self) -> None:
        super().clone_from(other)
        self.cursor = other.cursor.clone()
