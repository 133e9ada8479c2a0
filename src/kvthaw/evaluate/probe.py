"""Observe sparse steps: exact attention to compare them with, and what each row of a batch attended to and holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvthaw.cache.choice import Choice
from kvthaw.cache.device_layers import DenseLayer
from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.layer_base import LayerKV
from kvthaw.cache.offloaded_layer import OffloadedLayer

if TYPE_CHECKING:
    from kvthaw.engine.hf import Cache


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


class PerRequestStats(Observer):
    """Count the rows that each sequence of a cache selects and fetches. Other observers may watch the layers too.

    It adds to tensors on the device and never waits for them, so steps that it observes can be captured in CUDA graphs.
    """

    graph_safe = True

    def __init__(self, cache: Cache) -> None:
        self._cache, sequences = cache, cache.kv.sequences
        self._begin = [sequences.length(seq) for seq in range(sequences.count)]
        self._choosing = [kv for kv in cache.kv.offloaded if kv.leader is None and kv.retriever is not None]
        self._host: dict[int, int] = {}
        if self._choosing:
            device = self._choosing[0].slab.data.device
            self._live = torch.ones(len(self._begin), dtype=torch.int64, device=device)
            counts = 3, len(self._begin)  # selected, fetched, most of a head
            self._counted = torch.zeros(counts, dtype=torch.int64, device=device)
        super().__init__(cache.kv)

    def ended(self, row: int) -> None:
        """Stop counting a row after its last token. Its current host bytes are the ones reported."""
        if row not in self._host:
            self._host[row] = sum(kv.host_bytes(row) for kv in self._cache.kv.offloaded)
            if self._choosing:
                self._live[row] = 0

    def rows(self, steps: list[int]) -> list[dict[str, Any]]:
        """Return the stats of every sequence as records hold them: fields of `kvthaw.engine.hf.Stats`. Waits for the device.

        Bytes of a dense method count as device bytes.

        steps: tokens that each sequence decoded.
        """
        counted = self._counted.T.tolist() if self._choosing else [(0, 0, 0)] * len(steps)
        return [self._row(row, count, *of) for row, (count, of) in enumerate(zip(steps, counted, strict=True))]

    def _row(self, row: int, steps: int, selected: int, fetched: int, most: int) -> dict[str, Any]:
        layers, frozen = self._cache.kv.layers, self._cache.kv.offloaded
        end = self._begin[row] + steps
        held = [self._cache.kv.sequences.held_at(row, n) for n in range(self._begin[row] + 1, end + 1)] if frozen else []
        heads = frozen[0].slab.data.shape[1] if frozen else 0
        retrieved = selected / (steps * len(self._choosing) * heads) if steps and self._choosing else 0.0
        self.ended(row)
        device, dense = sum(kv.device_bytes() for kv in frozen) // len(self._begin), self._cache.settings.method.dense
        kept = sum(kv.token_bytes() * end for kv in layers if isinstance(kv, DenseLayer))
        return {
            "held_budget": frozen[0].plan.budget if frozen and frozen[0].plan else None,
            "sparse_steps": steps * len(frozen),
            "attended_mean": sum(held) / len(held) + retrieved if held else None,
            "attended_max": max(held) + most if held else None,
            "retrieved": retrieved if held else None,
            "hit_rate": 1 - fetched / selected if selected else None,
            "kv_device_bytes": kept if dense else device,
            "kv_dense_bytes": 0 if dense else kept,
            "kv_host_bytes": self._host[row],
        }

    def __call__(self, layer: OffloadedLayer, query: Tensor, choice: Choice | None) -> None:
        """Count the rows that an index layer selected."""
        if layer.leader is not None or choice is None:
            return
        counts = choice.selection.counts.to(self._live.device, non_blocking=True)
        selected = counts.sum(dim=1)
        fetched = torch.zeros_like(selected) if choice.fetch is None else (choice.fetch >= 0).sum(dim=(1, 2)).to(counts.device)
        self._counted[:2].add_(torch.stack((selected, fetched)) * self._live)
        self._counted[2].copy_(torch.maximum(self._counted[2], counts.amax(dim=1) * self._live))
