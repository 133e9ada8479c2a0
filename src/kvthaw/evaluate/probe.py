"""How good a selection is: each sparse step beside the exact attention over every token."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from kvthaw.cache.group import Choice
from kvthaw.cache.layer import FrozenLayer
from kvthaw.engine.hf import Cache
from kvthaw.errors import ConfigError
from kvthaw.evaluate.metrics import mean
from kvthaw.kernels.merge import merge


@dataclass(frozen=True, slots=True)
class Observation:
    """One sparse step of one layer and lane, after the token at position `length` - 1.

    attention_mass [Hq]: the share of the exact softmax over all tokens that sink, window, buffer and the selected rows cover;
    for a sampling method, the rows that the head drew. recall_at_k [H]: the share of the exact top-k of the retrieval region
    that was selected, k as many rows as were selected; NaN where none was. Rows rank by the largest softmax weight over the
    retrieval region in their query group, ties allowed. output_error [Hq]: |sparse - full| / |full|. All float32, on the CPU.
    """

    layer: int
    lane: int
    length: int
    attention_mass: Tensor
    recall_at_k: Tensor
    output_error: Tensor


@dataclass(frozen=True, slots=True)
class Quality:
    """Means over steps, layers and heads; None where nothing was observed. observed: steps times layers times lanes."""

    attention_mass: float | None
    recall_at_k: float | None
    output_error: float | None
    observed: int


class Probe:
    """Observes every sparse layer of a cache, at every n-th step of each.

    reference: a cache that holds the same first tokens in full; rows are read from it instead of the host store, and for a
    method that evicts there is no other place. Exact attention here knows neither softcap nor learned sinks. `seconds` is the
    time that observing took, to be taken off timings.
    """

    def __init__(self, cache: Cache, *, every: int = 1, reference: Cache | None = None) -> None:
        if every < 1:
            raise ConfigError(f"every is {every}; it must be at least 1")
        self.every = every
        self.observations: list[Observation] = []
        self.seconds = 0.0
        self._layers = cache.frozen_layers
        self._steps = {layer.number: 0 for layer in self._layers}
        self._reference = {} if reference is None else {layer.number: layer for layer in reference.kv_layers}
        for layer in self._layers:
            layer.observer = self._observe

    def detach(self) -> None:
        """Observe no more."""
        for layer in self._layers:
            layer.observer = None

    def quality(self) -> Quality:
        """Means over all that was observed."""
        seen = self.observations
        return Quality(
            mean(float(o.attention_mass.mean()) for o in seen),
            mean(float(o.recall_at_k.nanmean()) for o in seen),
            mean(float(o.output_error.mean()) for o in seen),
            len(seen),
        )

    def _observe(self, layer: FrozenLayer, query: Tensor, choice: Choice | None) -> None:
        step = self._steps[layer.number]
        self._steps[layer.number] = step + 1
        if step % self.every:
            return
        start = _now(query.device)
        for lane in range(layer.lanes):
            rows = self._rows(layer, lane, query.device)
            if rows is not None:
                self.observations.append(observe(layer, lane, query[lane], choice, rows))
        self.seconds += _now(query.device) - start

    def _rows(self, layer: FrozenLayer, lane: int, device: torch.device) -> list[Tensor] | None:
        """All rows of a lane in parts [H, n, 2, D], or None where some are gone for good."""
        length, known = layer.length(lane), self._reference.get(layer.number)
        prefix = 0 if known is None else min(length, known.length(lane))
        if layer.settings.method.evicts and prefix < length:
            assert layer.plan is not None
            gone = layer.indexed(lane) > layer.plan.regions.sink and prefix < layer.indexed(lane)
            if gone:
                return None
        parts = [] if known is None or prefix == 0 else [known.read(lane, 0, prefix).to(device)]
        return [*parts, layer.read(lane, prefix, length).to(device)] if prefix < length else parts


def observe(layer: FrozenLayer, lane: int, query: Tensor, choice: Choice | None, rows: list[Tensor]) -> Observation:
    """One query a head, [Hq, D], against all rows of a lane, given in parts [H, n, 2, D] in order; float32 throughout."""
    assert layer.plan is not None
    length, sink, ring = layer.length(lane), layer.plan.regions.sink, layer.indexed(lane)
    heads = rows[0].shape[0]
    folded = query.float().reshape(heads, -1, query.shape[-1])
    scores = torch.cat([folded @ part[:, :, 0].float().transpose(1, 2) for part in rows], dim=2) * layer.scale  # [H, G, n]
    added = torch.full_like(scores, -torch.inf)  # what the sparse softmax adds to each score
    added[:, :, : min(sink, length)] = 0.0
    added[:, :, ring:] = 0.0
    recall = torch.full((heads,), math.nan)
    if choice is not None:
        selected, log_weight = choice.selection.rows[lane].to(query.device), choice.selection.log_weight
        for head in range(heads):
            kept = selected[head] >= 0
            places = selected[head, kept].long()
            drawn = torch.zeros((scores.shape[1], places.shape[0]), device=scores.device)
            if log_weight is not None:
                drawn = log_weight[lane].to(scores).reshape(heads, -1, log_weight.shape[-1])[head, :, kept]
            added[head, :, places] = drawn
            recall[head] = _recall(scores[head, :, sink:ring], places - sink)
    exact = torch.softmax(scores, dim=2)
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
        outs = [thin.reshape(1, *query.shape), partial.out[lane : lane + 1].to(thin)]
        merged, _ = merge(outs, [lse.reshape(1, -1), partial.lse[lane : lane + 1].to(lse)])
        thin = merged.reshape(thin.shape)
    error = (thin - full).norm(dim=2) / full.norm(dim=2).clamp_min(1e-30)
    return Observation(layer.number, lane, length, mass.flatten().cpu(), recall, error.flatten().cpu())


def _recall(scores: Tensor, chosen: Tensor) -> float:
    """The share of the best that was chosen. scores [G, R] over the retrieval region; chosen [k] places in it."""
    k = chosen.shape[0]
    if k == 0 or scores.shape[1] == 0:
        return math.nan
    weights = torch.log_softmax(scores, dim=1).amax(dim=0)
    least = torch.topk(weights, k).values[-1]
    return float((weights[chosen] >= least).float().mean())


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
