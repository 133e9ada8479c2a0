"""Top-p pruning of what another index proposes (Twilight, sections 4.1 and 4.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kvthaw.cache.index_api import Index, IndexContext, Selection
from kvthaw.errors import ConfigError, at_least, proportion
from kvthaw.index.around import AroundIndex
from kvthaw.index.tokens import TokenIndex, log_shares


def quantise(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [..., D] in 4 bits a channel: k ~ zero + step code, with zero the least channel of a key and 15 steps to its largest.

    Returns codes [..., ceil(D / 2)] uint8, the even channel in the low bits, and grid [..., 2] float32: zero, step.
    """
    low, high = keys.float().aminmax(dim=-1, keepdim=True)
    step = (high - low) / 15
    code = ((keys.float() - low) / step.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.uint8)
    code = F.pad(code, (0, code.shape[-1] % 2))
    return code[..., ::2] | (code[..., 1::2] << 4), torch.cat((low, step), dim=-1)


class QuantisedKeys(TokenIndex):
    """Every key in 4 bits a channel, and its zero and step."""

    def __init__(self, context: IndexContext, *, stored: bool = False) -> None:
        super().__init__(
            context,
            columns={"codes": ((-(-context.head_dim // 2),), torch.uint8), "grids": ((2,), torch.float32)},
        )
        self.stored = stored  # keys are read from the store

    def encode(self, seqs: Sequence[int], keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        if self.stored:
            starts = [self.first + self.counts[seq] for seq in seqs]
            read = (self.context.store.read(seq, at, at + keys.shape[2]) for seq, at in zip(seqs, starts, strict=True))
            keys = torch.stack([rows[:, :, 0] for rows in read])
        codes, grids = quantise(keys)
        return {"codes": codes, "grids": grids}

    def scores(self, query: Tensor, rows: Tensor) -> Tensor:
        """Estimates of q.k, unscaled: query [B, H, G, D], rows [B, H, N] int32 -> [B, H, G, N] float32. Of a row -1, anything."""
        place = (rows.long() - self.first).clamp(min=0)[..., None]
        codes, grids = (self.tables[name][: len(rows)] for name in ("codes", "grids"))
        codes = codes.gather(2, place.expand(-1, -1, -1, codes.shape[3]))
        grids = grids.gather(2, place.expand(-1, -1, -1, 2))[:, :, None]
        whole = torch.stack((codes & 15, codes >> 4), dim=4).flatten(3)[..., : query.shape[3]]
        query = query.float()
        return grids[..., 0] * query.sum(dim=3, keepdim=True) + grids[..., 1] * (query @ whole.float().transpose(2, 3))


class PrunedIndex(AroundIndex, tested=True):
    """Select the fewest rows with at least share p of the estimated softmax weight, among the rows that another index
    proposes.

    The other index proposes `spare` times the rows that may be selected. Every query head keeps its own top-p of them, by
    4-bit estimates of q.k; A KV head's rows are the union over its group. If too many, the rows with the largest weight of
    any head stay. A sequence whose tokens all fit is not pruned. Estimates are kept where the other index works.
    """

    def __init__(self, context: IndexContext, *, index: Callable[[IndexContext], Index], p: float, spare: int) -> None:
        proportion(p=p)
        at_least(1, spare=spare)
        inner = index(replace(context, rows=spare * context.rows))
        if inner.traits.rebuilds:
            raise ConfigError(f"base is a method that makes keys of its own, {type(inner).__name__}; its rows cannot be pruned")
        here = replace(context, device=torch.device("cpu"), deferred=None) if inner.traits.on_host else context
        self.keys = QuantisedKeys(here, stored=inner.traits.on_host)
        super().__init__(context, inner, self.keys)
        self.p, self.spare = p, spare

    def select(self, query: Tensor, budget: int) -> Selection:
        """Select rows; see Index. Raises ConfigError if the other index returns weights or partial attention."""
        proposed = self.inner.select(query, self.spare * budget)
        if proposed.log_weight is not None or proposed.partial is not None:
            raise ConfigError(
                f"base is a method that weighs or estimates, {type(self.inner).__name__}; its rows cannot be pruned"
            )
        self.keys.make_room(0, 1)  # rows that are none are looked up too
        self.keys.ready(query)
        batch, rows = query.shape[0], proposed.rows
        here = (rows >= 0)[:, :, None]
        scores = self.keys.scores(query.unflatten(1, (self.context.kv_heads, -1)), rows) * self.context.scale
        logs = log_shares(scores.masked_fill(~here, -torch.inf))
        ranked, order = logs.sort(dim=3, descending=True, stable=True)
        weights = ranked.exp()
        needed = weights.cumsum(dim=3) - weights < self.p
        fits = (self.keys.known[:batch] <= budget)[:, None, None, None]
        kept = torch.zeros_like(needed).scatter_(3, order, needed) | fits
        best = torch.topk(logs.masked_fill(~kept, -torch.inf).amax(dim=2), budget, dim=2)
        chosen = torch.where(best.values > -torch.inf, rows.gather(2, best.indices), -1)
        return Selection(chosen, (chosen >= 0).sum(dim=2, dtype=torch.int32))
