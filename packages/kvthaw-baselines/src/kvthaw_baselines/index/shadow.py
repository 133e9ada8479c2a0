"""Chunks with landmarks, and low-rank keys from which the chunks' keys are reconstructed (ShadowKV)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from kvthaw.cache.index_api import IndexContext
from kvthaw.cache.pool import Slab
from kvthaw.errors import at_least
from kvthaw.index.tables import Column
from kvthaw.index.units import Seq, UnitIndex
from kvthaw.kernels.unit_select import Policy
from kvthaw_baselines.index.principal import principal


class ShadowIndex(UnitIndex, tested=True):
    """Chunks of `chunk` tokens in text order, ranked by q times their mean key. `outliers` chunks are always selected first.

    Outliers are the prompt's chunks whose worst key has the least cosine with its chunk's mean. They take at most a quarter
    of the rows that select() may return. The prompt's keys before RoPE, of all KV heads side by side, are approximated with
    `rank`: factors [B, 1, T, rank] and basis [B, rank, H, D]. After rows of the prompt have been fetched, rebuild()
    replaces their keys by this approximation. Outliers, later tokens, and sequences that are fetched whole keep their keys.
    RoPE is undone only if the approximation is better then, since some layers of some models have none.

    known, total: [B] int32, tokens that have factors, and all tokens.
    turned: [B] bool, whether keys are approximated before RoPE.
    exact: [B, H, T] bool, outliers.
    """

    traits = replace(UnitIndex.traits, rebuilds=True)
    mapped = shuffled = True
    factors = Column()
    basis = Column()
    exact = Column()
    known = Column()
    total = Column()
    turned = Column()

    def __init__(
        self, context: IndexContext, *, chunk: int = 8, rank: int = 160, outliers: int = 48, policy: Policy = "max"
    ) -> None:
        at_least(1, chunk=chunk, rank=rank)
        at_least(0, outliers=outliers)
        super().__init__(context, size=chunk, batch=chunk, width=context.head_dim, policy=policy)
        heads, dim = context.kv_heads, context.head_dim
        self.rank = min(rank, context.ranks.all_heads(heads) * dim)
        self.outliers = min(outliers, context.rows // (4 * chunk)) if context.rows else outliers
        self.tables.add("factors", (1, "prompt", self.rank), context.dtype)
        self.tables.add("basis", (self.rank, heads, dim), context.dtype)
        self.tables.add("exact", (heads, "prompt"), torch.bool)
        self.tables.add("known", (), torch.int32)
        self.tables.add("total", (), torch.int32)
        self.tables.add("turned", (), torch.bool)

    # Index

    def make_room(self, seqs: int, tokens: int) -> None:
        super().make_room(seqs, tokens)
        self._reserve_factors(tokens)

    def lengths(self, seq: int) -> dict[str, int]:
        return super().lengths(seq) | {"prompt": self.seqs[seq].tokens}

    def sync_counts(self, seqs: Sequence[int]) -> None:
        self.total.copy_(torch.tensor([seq.tokens for seq in self.seqs], dtype=torch.int32), non_blocking=True)

    def build(self, seq: int, first: int, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        self.clear(seq, first)
        heads, tokens, dim = keys.shape
        if not tokens:
            return
        self.reserve(0, -(-tokens // self.size) + 1, tokens)
        landmarks, chunks = self.digest(keys), tokens // self.size
        members = keys[:, : chunks * self.size].unflatten(1, (chunks, self.size)).float()
        worst = torch.cosine_similarity(members, landmarks[:, :chunks, None], dim=3).amin(dim=2)
        count = min(self.outliers, chunks)
        always = torch.zeros((heads, landmarks.shape[1]), dtype=torch.bool, device=keys.device)
        always.scatter_(1, torch.topk(worst, count, dim=1, largest=False).indices, True)
        # The outliers come first; a chunk that is not full stays last.
        order = torch.sort((~always).int(), dim=1, stable=True).indices
        static = count * self.size
        place = (order[:, :, None] * self.size + torch.arange(self.size, device=keys.device)).flatten(1)[:, :tokens]
        self.order[seq, :, :tokens] = (first + place).int()
        units = landmarks.shape[1] - count
        rest = order[:, count:, None].expand(-1, -1, dim)
        self.digests[seq, :, :units] = landmarks.gather(1, rest).to(self.digests.dtype)
        ends = (torch.arange(units + 1, device=keys.device) * self.size).clamp(max=tokens - static)
        self.stops[seq, :, : units + 1] = (static + ends).int()
        kept = tokens % self.size
        self._keep(seq, tokens - kept, keys[:, tokens - kept :])
        marks = [(0, 0)] if units == 0 and not static else [(0, 0), (tokens - kept, units - (kept > 0))]
        self._set(seq, Seq(tokens, units, kept, marks))
        self._factorise(seq, keys)
        self.exact[seq, :, :tokens] = always.repeat_interleave(self.size, dim=1)[:, :tokens]

    def rebuild(self, slab: Slab, fetch: Tensor, slots: Tensor) -> None:
        """Replace fetched keys of the prompt's tokens, except outliers and sequences that are fetched whole; see Index."""
        batch = fetch.shape[0]
        if self.factors.shape[2] == 0:
            return
        place = (fetch - self.first).clamp(min=0, max=self.factors.shape[2] - 1).long()
        wanted = (fetch >= 0) & (fetch - self.first < self.known[:batch, None, None]) & ~self.exact[:batch].gather(2, place)
        wanted &= self.total[:batch, None, None] > fetch.shape[2]
        source = torch.full((*fetch.shape[:2], slab.slots + 1), -1, dtype=torch.int64, device=fetch.device)
        among = torch.arange(fetch.shape[2], device=fetch.device).expand_as(place)
        source.scatter_(2, torch.where(wanted, slots, slab.slots).long(), among)
        source = source[:, :, : slab.slots, None]
        made = self.keys(place).gather(2, source.clamp(min=0).expand(-1, -1, -1, self.context.head_dim))
        pool = slab.data[:batch, :, slab.pool_start :, 0]
        pool.copy_(torch.where(source >= 0, made, pool))

    def keys(self, place: Tensor) -> Tensor:
        """Rebuilt keys [B, H, M, D] of the tokens at place [B, H, M], counted from the region's first."""
        batch = place.shape[0]
        seq = torch.arange(batch, device=place.device)[:, None, None]
        made = torch.einsum("bhmr,brhd->bhmd", self.factors[:batch, 0][seq, place].float(), self.basis[:batch].float())
        if self.context.rotary is not None:
            there = (place + self.first).flatten(0, 1)
            turned = self.context.rotary.turn(made.flatten(0, 1), there).view_as(made)
            made = torch.where(self.turned[:batch, None, None, None], turned, made)
        return made.to(self.factors.dtype)

    def truncate(self, seq: int, length: int) -> None:
        super().truncate(seq, length)
        if seq < len(self.known):
            self.known[seq].clamp_(max=max(0, length - self.first))

    def tensors(self) -> list[Tensor]:
        """See Index; and what rebuild() reads."""
        rotary = self.context.rotary
        return [*super().tensors(), *([] if rotary is None else [rotary.cos, rotary.sin])]

    def clone_from(self, other: Self) -> None:
        super().clone_from(other)
        if self.context.rotary is not None:
            self.context.rotary.reserve(self.first + self.factors.shape[2], self.context.device)

    # Inside

    def _factorise(self, seq: int, keys: Tensor) -> None:
        """The best approximation of the keys by `rank` directions: the leading eigenvectors of their Gram matrix."""
        own, ranks, rotary = self.context.heads, self.context.ranks, self.context.rotary
        keys = ranks.gather(keys, 0)
        heads, tokens, dim = keys.shape
        self._reserve_factors(tokens)
        forms = [keys.float()]
        if rotary is not None:
            positions = torch.arange(self.first, self.first + tokens, device=keys.device)[None].expand(heads, -1)
            forms.append(rotary.turn(keys, positions, back=True))
        found = []
        for form in forms:
            flat = form.transpose(0, 1).flatten(1).double()
            directions = principal(flat)[:, : self.rank]
            made = flat @ directions
            found.append((made.square().sum() / flat.square().sum(), made, directions))
        turned = len(found) > 1 and bool(found[1][0] > found[0][0])
        _, made, directions = found[turned]
        self.factors[seq, 0, :tokens] = made.to(self.factors.dtype)
        self.basis[seq] = directions.T.unflatten(1, (heads, dim))[:, own.start : own.stop].to(self.basis.dtype)
        self.known[seq].fill_(tokens)
        self.turned[seq].fill_(turned)

    def _reserve_factors(self, tokens: int) -> None:
        """Make room for the factors of a prompt's `tokens` tokens."""
        self.tables.reserve(0, prompt=tokens)
        if self.context.rotary is not None:
            self.context.rotary.reserve(self.first + tokens, self.context.device)
