"""Measure selections: means over the observations of a cache's sparse steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvthaw.cache.choice import Choice
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.engine.hf import Cache
from kvthaw.errors import at_least
from kvthaw.evaluate.machine import now
from kvthaw.evaluate.probe import Observer, exact_scores, sparse_bias, stored_rows
from kvthaw.evaluate.results import mean
from kvthaw.index.codes import CodesIndex
from kvthaw.kernels.merge import merge
from lab import ablated_codes


@dataclass(frozen=True, slots=True)
class Observation:
    """One sparse step of one layer and sequence, after the token at position `length` - 1.

    All tensors are float32 on the CPU. Below, n is the number of rows that the index may select. Rows rank by the largest
    softmax weight over the retrieval region in their query group, ties allowed. Attention that an index computed itself
    counts only in output_error.

    attention_mass: [Hq], the share of the exact softmax over all tokens that sink, window, buffer and the selected rows
        cover. For a sampling method, the rows that the head drew.
    held_mass: [Hq], the part of it in sink, window and buffer.
    exact_mass: [Hq], the share that these and the exact top-n would cover.
    rows: [H], number of selected rows.
    recall_at_k: [H], the selected share of the exact top-k of the retrieval region, where k is the number of selected rows;
        NaN if none was.
    recall_at_rows: [H], the same for the exact top-n.
    ceiling, ceiling_mass: [H] and [Hq], recall_at_rows and attention_mass of the exact best n among an index's candidates;
        NaN without candidates.
    output_error: [Hq], |sparse - full| / |full|.
    """

    layer: int
    seq: int
    length: int
    attention_mass: Tensor
    recall_at_k: Tensor
    output_error: Tensor
    rows: Tensor
    recall_at_rows: Tensor
    held_mass: Tensor
    exact_mass: Tensor
    ceiling: Tensor
    ceiling_mass: Tensor


_MEASURED = tuple(name for name in Observation.__dataclass_fields__ if name not in ("layer", "seq", "length"))


QUALITY = ("attention_mass", "recall_at_k", "output_error")
"""What records keep of a Quality."""


@dataclass(frozen=True, slots=True)
class Quality:
    """Means over steps, layers and heads; None if the probe observed nothing.

    observed: steps times layers times sequences. The others are as in Observation.
    """

    attention_mass: float | None
    recall_at_k: float | None
    output_error: float | None
    observed: int
    rows: float | None = None
    recall_at_rows: float | None = None
    held_mass: float | None = None
    exact_mass: float | None = None
    ceiling: float | None = None
    ceiling_mass: float | None = None

    @staticmethod
    def of(observations: Sequence[Observation]) -> Quality:
        """Return the means of observations, each counting once."""
        means = {name: mean(float(getattr(o, name).nanmean()) for o in observations) for name in _MEASURED}
        return Quality(observed=len(observations), **means)

    @staticmethod
    def pooled(parts: Sequence[Quality]) -> Quality:
        """Return the means of all that the parts observed; a part counts by how much it observed."""
        found: dict[str, float | None] = {}
        for name in _MEASURED:
            known = [(part.observed, value) for part in parts if (value := getattr(part, name)) is not None]
            count = sum(n for n, _ in known)
            found[name] = sum(n * value for n, value in known) / count if count else None
        return Quality(observed=sum(part.observed for part in parts), **found)


class Probe(Observer):
    """Observes every sparse layer of a cache, at every n-th step of each.

    reference: a cache that holds the same first tokens in full; rows are read from it instead of the host store. Exact attention
    here knows neither softcap nor learned sinks. `seconds` is the time that observing took, to be taken off timings.
    """

    def __init__(self, cache: Cache, *, every: int = 1, reference: Cache | None = None) -> None:
        at_least(1, every=every)
        self.every = every
        self.observations: list[Observation] = []
        self.seconds = 0.0
        self._steps: dict[int, int] = {}
        self._reference = {} if reference is None else {layer.number: layer for layer in reference.kv.layers}
        super().__init__(cache.kv)

    def quality(self) -> Quality:
        """Means over all that was observed."""
        return Quality.of(self.observations)

    def row(self, seq: int, begin: int, end: int) -> Quality | None:
        """Return the means over the observations of a sequence between two lengths; None if there are no observations."""
        seen = [one for one in self.observations if one.seq == seq and begin < one.length <= end]
        return Quality.of(seen) if seen else None

    def __call__(self, layer: OffloadedLayer, query: Tensor, choice: Choice | None) -> None:
        """Observe a step of a layer, if it is the n-th."""
        step = self._steps.get(layer.number, 0)
        self._steps[layer.number] = step + 1
        if step % self.every:
            return
        start = now(query.device)
        for seq in range(layer.sequences.count):
            rows = stored_rows(layer, seq, query.device, self._reference.get(layer.number))
            self.observations.append(observe(layer, seq, query[seq], choice, rows))
        self.seconds += now(query.device) - start


def observe(layer: OffloadedLayer, seq: int, query: Tensor, choice: Choice | None, rows: list[Tensor]) -> Observation:
    """One query a head, [Hq, D], against all rows of a sequence, given in parts [H, n, 2, D] in order; float32 throughout."""
    assert layer.plan is not None
    length, sink, ring = layer.length(seq), layer.plan.regions.sink, layer.indexed(seq)
    heads = rows[0].shape[0]
    scores = exact_scores(layer, query, rows)
    added, exact = sparse_bias(layer, seq, scores, choice), torch.softmax(scores, dim=2)
    held = torch.where(sparse_bias(layer, seq, scores, None) > -torch.inf, exact, 0.0).sum(dim=2)
    at_k, at_rows, ceiling, counts = (torch.full((heads,), math.nan) for _ in range(4))
    best_mass, ceiling_mass = torch.full_like(held, math.nan), torch.full_like(held, math.nan)
    if choice is not None:
        selected = choice.selection.rows[seq].to(query.device)
        among = _candidates(layer, seq, query)
        for head in range(heads):
            places = selected[head, selected[head] >= 0].long()
            counts[head] = places.shape[0]
            if not counts[head] and choice.selection.partial is not None:
                continue  # the index attended by itself
            region = _Region(scores[head, :, sink:ring])
            at_k[head] = region.recall(places - sink, places.shape[0])
            at_rows[head] = region.recall(places - sink, layer.plan.rows)
            best_mass[head] = held[head] + exact[head, :, region.best(layer.plan.rows) + sink].sum(dim=1)
            if among is not None:
                candidates = among[head, among[head] >= 0].long() - sink
                best = region.best(layer.plan.rows, candidates)
                ceiling[head] = region.recall(best, layer.plan.rows)
                ceiling_mass[head] = held[head] + exact[head, :, best + sink].sum(dim=1)
    mass = torch.where(added > -torch.inf, exact, 0.0).sum(dim=2)
    lse = torch.logsumexp(scores + added, dim=2)
    sparse = torch.exp(scores + added - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    both, start = torch.cat((exact, sparse), dim=1), 0
    out = torch.zeros((heads, both.shape[1], query.shape[-1]), device=query.device)
    for part in rows:
        out += both[:, :, start : start + part.shape[1]] @ part[:, :, 1].float()
        start += part.shape[1]
    full, thin = out.chunk(2, dim=1)
    if choice is not None and choice.selection.partial is not None:
        partial = choice.selection.partial
        outs = [thin.reshape(1, *query.shape), partial.out[seq : seq + 1].to(thin)]
        merged, _ = merge(outs, [lse.reshape(1, -1), partial.lse[seq : seq + 1].to(lse)])
        thin = merged.reshape(thin.shape)
    error = (thin - full).norm(dim=2) / full.norm(dim=2).clamp_min(1e-30)
    return Observation(
        layer=layer.number,
        seq=seq,
        length=length,
        attention_mass=mass.flatten().cpu(),
        recall_at_k=at_k,
        output_error=error.flatten().cpu(),
        rows=counts,
        recall_at_rows=at_rows,
        held_mass=held.flatten().cpu(),
        exact_mass=best_mass.flatten().cpu(),
        ceiling=ceiling,
        ceiling_mass=ceiling_mass.flatten().cpu(),
    )


class _Region:
    """The retrieval region of one KV head, as its query group ranks it. scores [G, R]."""

    def __init__(self, scores: Tensor) -> None:
        self.weights = torch.log_softmax(scores, dim=1).amax(dim=0)

    def best(self, k: int, among: Tensor | None = None) -> Tensor:
        """Return the places of the best k, or of the best k among some places [N]."""
        weights = self.weights if among is None else self.weights[among]
        found = torch.topk(weights, min(k, weights.shape[0])).indices
        return found if among is None else among[found]

    def recall(self, chosen: Tensor, k: int) -> float:
        """Return the share of the best k that the selected positions [N] include; NaN for k = 0 or an empty region."""
        k = min(k, self.weights.shape[0])
        if k == 0:
            return math.nan
        least = torch.topk(self.weights, k).values[-1]
        return min(1.0, float((self.weights[chosen] >= least).sum()) / k)


def _candidates(layer: OffloadedLayer, seq: int, query: Tensor) -> Tensor | None:
    """Return the rows [H, N] among which an index of two stages takes its rows for a query [Hq, D], -1 padded; None for other
    indexes."""
    assert layer.plan is not None and layer.retriever is not None
    index = layer.retriever.index
    if not isinstance(index, CodesIndex):
        return None
    return ablated_codes.candidates(index, query.expand(seq + 1, -1, -1).contiguous(), layer.plan.rows)[seq]
