"""Prompts and chunks of prompts that layers have attended to and store and index now; short ones for all layers at once.

A layer's share of 1,000 tokens keeps an H200 busy for less than .1 ms, and its launches, some fifteen, take the host 1 ms.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvthaw.cache.layer_base import last_queries
from kvthaw.cache.layer_storage import LayerStorage
from kvthaw.cache.offloader import offload_prompt
from kvthaw.cache.sequences import Sequences
from kvthaw.cache.step import Row, Step

SHORT = 1 << 22
"""Bytes of a layer's keys up to which a prompt waits until all layers have attended, so that many are held that long."""


@dataclass(frozen=True, slots=True)
class Given:
    """What a prefill step gave a layer: keys, values [B, H, T, D]; of each sequence the last queries [Hq, W, D], and the rows
    [H, n, 2, D] that passed on the device, where the step's own are yet to be written."""

    step: Step
    keys: Tensor
    values: Tensor
    queries: Mapping[int, Tensor]
    passed: Mapping[int, Tensor]

    def of(self, row: Row) -> tuple[Tensor, Tensor]:
        """Return keys and values [H, n, D] of a row without its padding."""
        return self.keys[row.row, :, row.pad :], self.values[row.row, :, row.pad :]

    def kind(self, storage: LayerStorage) -> Hashable:
        """Return what layers have in common that can be appended to together."""
        stored = tuple(storage.store.length(row.seq) for row in self.step.rows())
        return storage.offloader.kind, storage.store.format, self.keys.shape, stored


class Prompted(Protocol):
    """A layer. given: what it has yet to store and index; extremes: see kvthaw.cache.finite.Prompted."""

    sequences: Sequences
    storage: LayerStorage
    given: Given | None
    extremes: list[Tensor]

    def appended(self, given: Given, ends: Mapping[int, int]) -> None:
        """Note what has been stored, and where the rings of its sequences begin."""


def take_queries(step: Step, query: Tensor, recent: dict[int, Tensor], most: int | None) -> dict[int, Tensor]:
    """Have `recent` hold the last queries of each sequence with those of a step, [B, Hq, T, D]; see last_queries(). Returns those
    of them that are the step's."""
    last = {}
    for row in step.rows():
        own = query[row.row, :, row.pad - step.tokens :]  # a clone has the last queries only
        kept = recent[row.seq] = last_queries(recent.get(row.seq), own, row.past, most)
        n = own.shape[1] if most is None else min(own.shape[1], most)
        last[row.seq] = kept[:, kept.shape[1] - n :]
    return last


def append(layers: Sequence[Prompted]) -> None:
    """Store and index what layers were given: in those that are alike, that they wait for each other for, by few launches."""
    alike: dict[Hashable, list[tuple[Prompted, Given]]] = {}
    for layer in layers:
        if (given := layer.given) is not None:
            alike.setdefault(given.kind(layer.storage), []).append((layer, given))
            layer.given = None
    for group in alike.values():
        ends = dict[int, int]()
        for row in group[0][1].step.rows():
            ends[row.seq] = (_append_alike if len(group) > 1 else _append_one)(group, row)
        for layer, given in group:
            layer.appended(given, ends)


def _append_one(group: Sequence[tuple[Prompted, Given]], row: Row) -> int:
    """Returns where the sequence's ring begins then."""
    ((layer, given),), seq = group, row.seq
    keys, values = given.of(row)
    layer.extremes += *torch.aminmax(keys), *torch.aminmax(values)
    how = given.step.remaining, given.passed.get(seq)
    return layer.storage.append(row, given.queries[seq], keys, values, *how, paused=seq in layer.sequences.paused)


def _append_alike(group: Sequence[tuple[Prompted, Given]], row: Row) -> int:
    """As _append_one(), in several layers at once."""
    storages, pairs = [layer.storage for layer, _ in group], [given.of(row) for _, given in group]
    format, like, seq, past = storages[0].store.format, pairs[0][0], row.seq, row.past
    rows = like.new_empty((len(pairs), *like.shape[:2], 2, like.shape[2]))  # [L, H, n, 2, D]
    torch._foreach_copy_([part for own in rows for part in own.unbind(2)], [part for pair in pairs for part in pair])
    for (layer, _), most in zip(group, torch.linalg.vector_norm(rows.flatten(1), torch.inf, dim=1), strict=True):
        layer.extremes.append(most)
    rows = format.decode(format.encode(rows))  # which are what is stored from then on
    offload_prompt([storage.offloader for storage in storages], seq, past, rows)
    start = 0
    for (layer, given), own in zip(group, rows, strict=True):
        paused = seq in layer.sequences.paused
        how = given.queries[seq], *own.unbind(2), given.step.remaining
        start = layer.storage.index_prompt(row, *how, paused=paused)
    _hold(storages, seq, past, rows)  # from whose rings indexes have what they lack before
    return start


def _hold(storages: Sequence[LayerStorage], seq: int, past: int, rows: Tensor) -> None:
    """Write those of a sequence's rows [L, H, n, 2, D], from position `past` on, to sinks and rings that belong there."""
    slabs, length = [storage.slab for storage in storages], past + rows.shape[2]
    regions, targets, sources = slabs[0].regions, list[Tensor](), list[Tensor]()
    for begin, end in ((past, min(regions.sink, length)), (max(past, regions.first_indexed(length)), length)):
        for place, stop in slabs[0].runs(begin, end):
            targets += [slab.data[seq, :, place:stop] for slab in slabs]
            sources += rows[:, :, begin - past : begin - past + stop - place]
            begin += stop - place
    torch._foreach_copy_(targets, sources)
