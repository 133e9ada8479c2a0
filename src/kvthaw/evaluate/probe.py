"""Observe sparse steps, and exact attention to every token to compare them with."""

from __future__ import annotations

import torch
from torch import Tensor

from kvthaw.cache.choice import Choice
from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.layer_base import LayerKV
from kvthaw.cache.offloaded_layer import OffloadedLayer


class Observer:
    """Observes what every sparse layer of a cache chooses in each step, until it is detached."""

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


def attention_mass(layer: OffloadedLayer, seq: int, scores: Tensor, choice: Choice | None) -> Tensor:
    """Return the share [H, G] of the exact softmax that sink, window, buffer and the selected rows cover.

    scores: of exact_scores.
    """
    return torch.where(sparse_bias(layer, seq, scores, choice) > -torch.inf, torch.softmax(scores, dim=2), 0.0).sum(dim=2)


def sparse_bias(layer: OffloadedLayer, seq: int, scores: Tensor, choice: Choice | None) -> Tensor:
    """Return what the sparse softmax adds to each score [H, G, n]: -inf for rows that it leaves out."""
    added = torch.full_like(scores, -torch.inf)
    added[:, :, : min(layer.slab.regions.sink, layer.length(seq))] = 0.0
    added[:, :, layer.indexed(seq) :] = 0.0
    if choice is not None:
        selected, log_weight = choice.selection.rows[seq].to(scores.device), choice.selection.log_weight
        heads = scores.shape[0]
        drawn = None if log_weight is None else log_weight[seq].to(scores).reshape(heads, -1, log_weight.shape[-1])
        for head in range(heads):
            kept = selected[head] >= 0
            added[head, :, selected[head, kept].long()] = 0.0 if drawn is None else drawn[head, :, kept]
    return added


def exact_scores(layer: OffloadedLayer, query: Tensor, rows: list[Tensor]) -> Tensor:
    """Return scaled scores [H, G, n] of queries [Hq, D] and all rows of a sequence, in parts [H, n, 2, D]."""
    folded = query.float().reshape(rows[0].shape[0], -1, query.shape[-1])
    return torch.cat([folded @ part[:, :, 0].float().transpose(1, 2) for part in rows], dim=2) * layer.scale
