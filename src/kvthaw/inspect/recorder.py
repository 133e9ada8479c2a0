"""Record which tokens every layer and KV head selects, and which the exact top-k would have been."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvthaw.cache.choice import Choice
from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.layer_base import LayerKV
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.evaluate.probe import Observer, attention_mass, exact_scores, stored_rows

Rows = dict[int, Tensor]
"""By layer: selected rows [H, M] int32, padded with -1, on the CPU. Layers that reuse another layer's selection are missing."""


class Recorder(Observer):
    """Holds what every layer selected in the latest step, on the device. It copies once a layer and step, in place, so captured
    steps contain it."""

    graph_safe = True

    def __init__(self, kv: KVCache) -> None:
        self._kv, self._latest = kv, dict[int, Tensor]()
        super().__init__(kv)

    def __call__(self, layer: OffloadedLayer, query: Tensor, choice: Choice | None) -> None:
        """Keep a layer's selection until its next step."""
        if choice is None or layer.leader is not None:
            return
        rows = choice.selection.rows
        shape, held = (self._kv.sequences.count, *rows.shape[1:]), self._latest.get(layer.number)
        if held is None or held.shape != shape:
            held = self._latest[layer.number] = rows.new_full(shape, -1, device=query.device)
        held[: len(rows)].copy_(rows, non_blocking=True)

    def take(self, seq: int) -> Rows:
        """Return the rows that a sequence selected in the latest step; empty if all layers attend to everything. On a GPU the
        copy is queued behind the step. Synchronise the device before reading it."""
        if not self._latest or self._kv.chooser.full:
            return {}
        own = [held[seq] for held in self._latest.values()]
        flat = torch.cat([rows.flatten() for rows in own]).to("cpu", non_blocking=True)
        parts = flat.split([rows.numel() for rows in own])
        return {number: part.view(rows.shape) for number, part, rows in zip(self._latest, parts, own, strict=True)}


class ExactTopK(Observer):
    """Rank all tokens of the retrieval region at each selection of some sequences. This reads all of their keys, so that steps
    are slow and run eagerly.

    reference: layers by number that hold the same first tokens in full.
    rows: [H, M], the best by the largest softmax weight in the query group. Each head gets as many as it selected.
    mass: [H], the share of the exact softmax that sink, window, buffer and the selected rows cover, averaged over the
        group.
    """

    def __init__(self, kv: KVCache, seqs: Sequence[int] = (), reference: Sequence[LayerKV] = ()) -> None:
        self.seqs = seqs
        self._reference = {layer.number: layer for layer in reference}
        self._rows: dict[int, Rows] = {}
        self._mass: dict[int, Rows] = {}
        super().__init__(kv)

    def __call__(self, layer: OffloadedLayer, query: Tensor, choice: Choice | None) -> None:
        """Rank the tokens for one query a head."""
        if choice is None or layer.leader is not None:
            return
        for seq in self.seqs:
            parts = stored_rows(layer, seq, query.device, self._reference.get(layer.number))
            rows, mass = exact_rows(layer, seq, query[seq], choice, parts)
            self._rows.setdefault(seq, {})[layer.number] = rows.cpu()
            self._mass.setdefault(seq, {})[layer.number] = mass.cpu()

    def take(self, seq: int) -> tuple[Rows, Rows]:
        """Return the best rows and the attention mass by layer of a sequence's latest step, and forget them."""
        return self._rows.pop(seq, {}), self._mass.pop(seq, {})


def exact_rows(layer: OffloadedLayer, seq: int, query: Tensor, choice: Choice, parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the exact top-k rows and the attention mass that the selected rows cover with sink and ring.

    query: [Hq, D].
    choice: the step's; k is the number of rows that a head selected.
    parts: all rows of the sequence, [H, n, 2, D] each.

    Returns rows [H, M] int32 and mass [H].
    """
    sink, ring, scores = layer.slab.regions.sink, layer.indexed(seq), exact_scores(layer, query, parts)
    selected = choice.selection.rows[seq].to(query.device)
    best, counts = torch.full_like(selected, -1), (selected >= 0).sum(dim=1, keepdim=True)
    ranked = torch.log_softmax(scores[:, :, sink:ring], dim=2).amax(dim=1)
    k = min(selected.shape[1], ranked.shape[1])
    if k:
        found = (torch.topk(ranked, k).indices + sink).int()
        best[:, :k] = torch.where(torch.arange(k, device=found.device) < counts, found, -1)
    return best, attention_mass(layer, seq, scores, choice).mean(dim=1)


@dataclass(eq=False)
class Recording:
    """What the steps recalled that chose the tokens of one answer, an item a token. A step without a selection has {}.

    selected: the rows that the method selected.
    exact: the exact top-k of equal size, if they were ranked.
    mass: the attention mass [H] that the selection covers, if they were.
    """

    selected: list[Rows] = field(default_factory=list)
    exact: list[Rows] = field(default_factory=list)
    mass: list[Rows] = field(default_factory=list)

    def skip(self) -> None:
        """Add a token that a dense pass chose."""
        self.selected.append({})
        self.exact.append({})
        self.mass.append({})

    def follow(self, tokens: int, recorder: Recorder) -> None:
        """Add the latest step of a cache of one row, whose answer has `tokens` tokens now. A dense pass chose the first."""
        if len(self.selected) == tokens:
            return
        if self.selected:
            self.take(0, recorder)
        else:
            self.skip()

    def take(self, seq: int, recorder: Recorder, exact: ExactTopK | None = None) -> None:
        """Add the latest step."""
        self.selected.append(recorder.take(seq))
        rows, mass = exact.take(seq) if exact is not None else ({}, {})
        self.exact.append(rows)
        self.mass.append(mass)
