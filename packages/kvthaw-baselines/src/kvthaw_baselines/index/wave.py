"""Clusters: the best are read, the next are estimated and the others left out (RetroInfer's wave index)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kvthaw.cache.index_api import IndexContext, Selection
from kvthaw.errors import ConfigError, within
from kvthaw.index.clusters import ClusterIndex, Start
from kvthaw.index.tables import Column, Full, Target
from kvthaw.kernels import unit_scores
from kvthaw.kernels.merge import Partial
from kvthaw.kernels.unit_select import Policy


class WaveIndex(ClusterIndex, tested=True):
    """k-means within segments of the prompt, and an estimate of the attention to clusters that are not read.

    A prompt is clustered in segments of `segment` tokens, the last one shorter, one cluster for every tokens_per_cluster;
    so are every `batch` tokens after it. Clusters are taken whole in the order of q.C, the last one cut. The share
    `estimated` of all clusters, next in this order and without a selected row, enters as a partial: a cluster of s tokens
    with centroid C and mean value V has the weight s exp(scale q.C) and gives V. Tokens that are not clustered yet can be
    selected but not estimated. values [B, H, U, D]: mean values; recent_values, as recent; closed [B] int32: number of
    units that are clusters.
    """

    values = Column()
    recent_values = Column()
    closed = Column()

    def __init__(
        self,
        context: IndexContext,
        *,
        segment: int = 8192,
        tokens_per_cluster: int = 16,
        batch: int = 1024,
        estimated: float = 0.23,
        start: Start = "random",
        iterations: int = 10,
        policy: Policy = "mean",
    ) -> None:
        for name, value in (("tokens_per_cluster", tokens_per_cluster), ("batch", batch), ("segment", segment)):
            if value < 1 or value % tokens_per_cluster:
                raise ConfigError(
                    f"{name} is {value}; it must be a positive multiple of tokens_per_cluster, {tokens_per_cluster}"
                )
        within(0, 1, estimated=estimated)
        super().__init__(
            context,
            tokens_per_cluster=tokens_per_cluster,
            batch=batch,
            clusters_per_batch=batch // tokens_per_cluster,
            start=start,
            iterations=iterations,
            policy=policy,
        )
        self.segment, self.estimated = segment, estimated
        self.traits = replace(ClusterIndex.traits, attends=estimated > 0)
        self.tables.add("values", (context.kv_heads, "units", context.head_dim), context.dtype)
        self.tables.add("recent_values", self.recent.shape[1:], context.dtype)
        self.tables.add("closed", (), torch.int32)
        self._arriving: dict[int, Tensor] = {}  # values of a sequence's batches, [H, n, D], while many tokens come

    # Index

    def build(self, seq: int, first: int, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        tokens = keys.shape[1]
        whole, rest = divmod(tokens, self.segment)
        per, last = self.segment // self.tokens_per_cluster, max(1, rest // self.tokens_per_cluster) if rest else 0
        cut = whole * self.segment

        def job() -> None:
            if whole:
                self.form_now([Full(seq, 0, 0)], keys[None, :, :cut].unflatten(2, (whole, self.segment)), per)
            if rest:
                self.form_now([Full(seq, cut, whole * per)], keys[None, :, None, cut:], last)
            for i in range(whole):
                at = i * self.segment
                self._average([Full(seq, at, i * per)], per, values[None, :, at : at + self.segment])
            if rest:
                self._average([Full(seq, cut, whole * per)], last, values[None, :, cut:])

        self.build_beside(seq, first, tokens, whole * per + last, job, keys, values)

    def append(self, seqs: Sequence[int], keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        super().append(seqs, keys, values, queries)
        self._arriving.clear()

    def take_values(self, seqs: Sequence[int], values: Tensor) -> None:
        """Store the last values in a ring, as keys are, or aside if a batch has too many; see UnitIndex."""
        n, hosts = values.shape[2], [self.seqs[seq] for seq in seqs]
        for i, (seq, host) in enumerate(zip(seqs, hosts, strict=True)):
            if not self._fits(seq, n):
                known = self.recent_values[seq].index_select(1, self._ring(host.tokens - host.kept, host.kept))
                self._arriving[seq] = torch.cat((known, values[i]), dim=1)
        few = min(n, self.recent_values.shape[2])
        where = [Full(seq, host.tokens + n - few, 0) for seq, host in zip(seqs, hosts, strict=True)]
        self.recent_values[self.last_places(where, few)] = values[:, :, n - few :]

    def close(self, full: Sequence[Full], keys: Tensor | None) -> None:
        """See UnitIndex; at once, for their values follow."""
        self.join()
        own = self.last(full, self.recent)[:, :, None] if keys is None else keys
        self.form_now(full, own, self.per_batch)
        if keys is None:
            self._average(full, self.per_batch, self.last(full, self.recent_values))
            return
        ((seq, begin, before),) = full
        for i in range(keys.shape[2]):
            at = i * self.batch
            values = self._arriving[seq][None, :, at : at + self.batch]
            self._average([Full(seq, begin + at, before + i * self.per_batch)], self.per_batch, values)

    def upcoming(self, seq: int) -> int:
        """None: mean values follow a batch's clusters at once."""
        return 0

    def select(self, query: Tensor, budget: int) -> Selection:
        selection = super().select(query, budget)
        return Selection(selection.rows, selection.counts, partial=self._estimate(query, selection.rows))

    # Inside

    def _estimate(self, query: Tensor, rows: Tensor) -> Partial:
        """Return the attention to the clusters of the estimation zone: clusters without a selected row, in order, up to their
        share."""
        batch, heads = rows.shape[:2]
        many = self.looked_at(batch)
        tokens = self.context.looked_at([seq.tokens for seq in self.seqs[:batch]], self.order.shape[2])
        digests, values, stops = (table[:batch, :, :many] for table in (self.digests, self.values, self.stops[:, :, 1:]))
        begins = self.stops[:batch, :, :many]
        bounds, counts = self.stops[:batch, :, : many + 1], self.counts[:batch]
        scores = unit_scores.definition(query, digests, bounds, counts, scale=self.context.scale, mean=False)
        sizes = (stops - begins).clamp(min=0)
        here = (torch.arange(many, device=query.device) < self.closed[:batch, None, None]) & (sizes > 0)
        here &= ~self._touched(rows, bounds.clamp(min=0, max=tokens), tokens)
        weights = scores + sizes.log()[:, :, None]
        if self.policy == "mean_query":
            merged = unit_scores.definition(query, digests, bounds, counts, scale=self.context.scale, mean=True)[:, :, 0]
        else:
            total = torch.logsumexp(weights, dim=3, keepdim=True)
            shares = scores - torch.where(total == -torch.inf, 0.0, total)
            merged = shares.amax(dim=2) if self.policy == "max" else torch.logsumexp(shares, dim=2)
        order = merged.masked_fill(~here, -torch.inf).sort(dim=2, descending=True, stable=True).indices
        wanted = torch.arange(many, device=query.device) < (self.closed[:batch] * self.estimated).long()[:, None, None]
        zone = torch.zeros_like(here).scatter_(2, order, wanted.expand(-1, heads, -1)) & here
        logits = weights.masked_fill(~zone[:, :, None], -torch.inf)
        lse = torch.logsumexp(logits, dim=3)
        share = torch.exp(logits - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
        return Partial((share @ values.float()).flatten(1, 2), lse.flatten(1, 2))

    def _touched(self, rows: Tensor, bounds: Tensor, tokens: int) -> Tensor:
        """Which units have a row among rows [B, H, M]: [B, H, U] bool. bounds [B, H, U + 1]: their stops."""
        chosen = torch.zeros((*rows.shape[:2], tokens + 1), dtype=torch.bool, device=rows.device)
        chosen.scatter_(2, torch.where(rows >= 0, rows - self.first, tokens).long(), True)
        chosen[:, :, tokens] = False
        place = (self.order[: len(rows), :, :tokens] - self.first).clamp(min=0, max=tokens).long()
        upto = F.pad(chosen.gather(2, place).cumsum(dim=2), (1, 0))
        at = upto.gather(2, bounds.long())
        return at[:, :, 1:] > at[:, :, :-1]

    def _average(self, full: Sequence[Full], count: int, values: Tensor) -> None:
        """Return the mean values of `count` units of each sequence, from values [R, H, n, D]."""
        target, wide = Target.of(full, self.context.kv_heads, values.device), values.shape[3]
        place = self.order[target.places(values.shape[2])].long() - (self.first + target.begin)
        ordered = values.gather(2, place[..., None].expand(-1, -1, -1, wide))
        sums = ordered.mT.double().contiguous().cumsum(dim=3).mT  # along the last dimension a GPU sums in parallel
        upto = F.pad(sums, (0, 0, 1, 0))
        stops = self.stops[target.units(count + 1)].long() - target.begin
        at = upto.gather(2, stops[..., None].expand(-1, -1, -1, wide))
        means = (at[:, :, 1:] - at[:, :, :-1]) / stops.diff(dim=2).clamp(min=1)[..., None]
        self.values[target.units(count)] = means.to(self.values.dtype)

    def sync_counts(self, seqs: Sequence[int]) -> None:
        closed = [seq.units if seq.kept in (0, self.batch) else seq.marks[-1][1] for seq in self.seqs]
        self.closed.copy_(torch.tensor(closed, dtype=torch.int32), non_blocking=True)

    def _rings(self) -> list[str]:
        return [*super()._rings(), "recent_values"]
