"""Measure selections: compare each sparse step with exact attention to every token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvthaw.cache.choice import Choice
from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.layer_base import LayerKV
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.index.codes import CodesIndex
from kvthaw.kernels.merge import merge


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


class Observer:
    """Is called with what every sparse layer of a cache chooses, step after step, until it is detached."""

    def __init__(self, kv: KVCache) -> None:
        self._observers = kv.streams.observers
        self._observers.append(self)

    def detach(self) -> None:
        """Observe no more."""
        self._observers.remove(self)

    def __call__(self, layer: OffloadedLayer, query: Tensor, choice: Choice | None) -> None:
        """Observe a step of a layer."""
        raise NotImplementedError


def stored_rows(layer: OffloadedLayer, seq: int, device: torch.device, known: LayerKV | None = None) -> list[Tensor]:
    """Return all rows of a sequence in parts [H, n, 2, D].

    known: a layer that holds its first tokens in full.
    """
    length = layer.length(seq)
    prefix = 0 if known is None else min(length, known.length(seq))
    parts = [] if known is None or prefix == 0 else [known.read(seq, 0, prefix).to(device)]
    return [*parts, layer.read(seq, prefix, length).to(device)] if prefix < length else parts


def observe(layer: OffloadedLayer, seq: int, query: Tensor, choice: Choice | None, rows: list[Tensor]) -> Observation:
    """One query a head, [Hq, D], against all rows of a sequence, given in parts [H, n, 2, D] in order; float32 throughout."""
    assert layer.plan is not None
    length, sink, ring = layer.length(seq), layer.plan.regions.sink, layer.indexed(seq)
    heads = rows[0].shape[0]
    scores = exact_scores(layer, query, rows)
    added = torch.full_like(scores, -torch.inf)  # what the sparse softmax adds to each score
    added[:, :, : min(sink, length)] = 0.0
    added[:, :, ring:] = 0.0
    exact = torch.softmax(scores, dim=2)
    held = torch.where(added > -torch.inf, exact, 0.0).sum(dim=2)
    at_k, at_rows, ceiling, counts = (torch.full((heads,), math.nan) for _ in range(4))
    best_mass, ceiling_mass = torch.full_like(held, math.nan), torch.full_like(held, math.nan)
    if choice is not None:
        selected, log_weight = choice.selection.rows[seq].to(query.device), choice.selection.log_weight
        among = _candidates(layer, seq, query)
        for head in range(heads):
            kept = selected[head] >= 0
            places = selected[head, kept].long()
            drawn = torch.zeros((scores.shape[1], places.shape[0]), device=scores.device)
            if log_weight is not None:
                drawn = log_weight[seq].to(scores).reshape(heads, -1, log_weight.shape[-1])[head, :, kept]
            added[head, :, places] = drawn
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


def exact_scores(layer: OffloadedLayer, query: Tensor, rows: list[Tensor]) -> Tensor:
    """Return scaled scores [H, G, n] of queries [Hq, D] and all rows of a sequence, in parts [H, n, 2, D]."""
    folded = query.float().reshape(rows[0].shape[0], -1, query.shape[-1])
    return torch.cat([folded @ part[:, :, 0].float().transpose(1, 2) for part in rows], dim=2) * layer.scale


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
    return index.candidates(query.expand(seq + 1, -1, -1).contiguous(), layer.plan.rows)[seq]
