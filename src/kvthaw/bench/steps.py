"""Run and time the steps of one cache."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.engine.decode import decode
from kvthaw.engine.graph_runner import ElasticGraph, capturable
from kvthaw.engine.hf import Cache, DynamicCache, PreTrainedModel
from kvthaw.engine.hf.cache_argument import CACHE
from kvthaw.engine.hf.fused import fusing
from kvthaw.engine.hf.tensor_parallel import ranks
from kvthaw.errors import CacheError
from kvthaw.evaluate.machine import now

WARM = 6
"""Steps of each way that do not count, at least: kernels are compiled and tuned in them, and graphs captured."""
_PATIENCE = 6.0
"""Seconds after which no more of them are taken than WARM."""


def most_warm(device: torch.device) -> int:
    """At most: the first tokens that leave a ring leave uncounted, for that compiles kernels too; on a CPU if they do so soon."""
    return 640 if device.type == "cuda" else 40


@dataclass(frozen=True, slots=True)
class Steps:
    """What some steps took.

    gaps: seconds of each, the device at rest between them.
    counts: before and after.
    peak: bytes.
    chosen: the likeliest tokens [B] after each.
    """

    gaps: tuple[float, ...]
    counts: tuple[Counts, Counts]
    peak: int | None
    chosen: tuple[Tensor, ...] = ()

    @property
    def mean(self) -> float:
        """Mean seconds of a step, steps that update an index included."""
        return statistics.mean(self.gaps)

    def quantile(self, share: float) -> float:
        """Return a quantile of the gaps, for example their median for a share of 0.5."""
        return sorted(self.gaps)[min(len(self.gaps) - 1, round(share * len(self.gaps)))]

    def elapsed(self) -> dict[str, float]:
        """Return the seconds after 16, 32, 64 ... and all steps."""
        marks = [n for k in range(4, 32) if (n := 1 << k) < len(self.gaps)] + [len(self.gaps)]
        return {str(n): sum(self.gaps[:n]) for n in marks}


@dataclass(frozen=True, slots=True)
class Counts:
    """What a cache had selected, fetched and stored at one time: rows of its groups, bytes of all of its layers."""

    selected: int = 0
    fetched: int = 0
    fetched_bytes: int = 0
    stored_bytes: int = 0

    @staticmethod
    def of(cache: DynamicCache) -> Counts:
        """Now; waits for the device."""
        if not isinstance(cache, Cache):
            return Counts()
        layers = cache.kv.offloaded
        groups = {kv.retriever: kv.retriever.residency.counted() for kv in layers if kv.retriever is not None}
        stored = [(kv.store, kv.store.length(seq)) for kv in layers for seq in range(kv.sequences.count)]
        return Counts(
            sum(each.selected for each in groups.values()),
            sum(each.fetched for each in groups.values()),
            sum(groups[kv.retriever].fetched * kv.store.row_bytes for kv in layers if kv.retriever is not None),
            sum(store.token_bytes * length for store, length in stored),
        )


def prefill(model: PreTrainedModel, cache: DynamicCache, ids: Tensor) -> float:
    """Process a prompt [B, T]; seconds until its first token is known."""
    begin = now(model.device)
    model(ids, **{CACHE: cache}, logits_to_keep=1).logits[:, -1].argmax(dim=-1)
    return now(model.device) - begin


def warm_steps(cache: DynamicCache) -> int:
    """Steps of a cache that do not count: WARM, or up to most_warm() if tokens leave a ring of its layers by then."""
    layers = cache.kv.offloaded if isinstance(cache, Cache) else []
    most = [most_warm(kv.slab.data.device) - 1 for kv in layers]
    first = [(_undisturbed(kv, steps), steps) for kv, steps in zip(layers, most, strict=True)]
    return max([WARM, *(steps + 2 for steps, limit in first if steps < limit)])


def _undisturbed(kv: OffloadedLayer, steps: int) -> int:
    """Return how many of the next steps come before tokens leave a ring."""
    if kv.updater is not None:
        return kv.updater.undisturbed(steps)
    return next((step for step in range(steps) if kv.sequences.leaving(step)), steps)


def take(
    model: PreTrainedModel,
    cache: Cache | DynamicCache,
    tokens: Iterator[Tensor],
    count: int,
    warm: int | None = None,
    *,
    capture: bool,
) -> Steps:
    """Run `warm` warm-up steps and `count` timed steps.

    warm: None: `warm_steps` decides, with fewer steps if they are slow.

    tokens: ids [B, 1] of each step. A model with random weights that chose its own tokens would soon repeat one.
    capture: as for `kvthaw.engine.decode.decode`.

    Raises CacheError if the last logits are not finite.
    """
    device, skipped, processes = model.device, warm_steps(cache) if warm is None else warm, ranks(model)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    gaps: list[float] = []
    chosen: list[Tensor] = []
    last, before, begin, patience = torch.zeros(1), Counts(), 0.0, math.inf

    def choose(logits: Tensor) -> Tensor | None:
        nonlocal begin, last, before, skipped, patience
        if begin:
            chosen.append(logits.argmax(dim=-1))
            gaps.append(now(device) - begin)
            if len(gaps) == WARM:  # behind all that is compiled and captured
                patience = time.perf_counter() + _PATIENCE
            if WARM <= len(gaps) < skipped and not processes.least(time.perf_counter() < patience):
                skipped = len(gaps)
        last = logits
        if len(gaps) == skipped + count:
            return None
        if len(gaps) == skipped:
            before = Counts.of(cache)
        ids, begin = next(tokens), now(device)
        return ids

    for _ in decode(model, cache, last, choose, capture=capture):
        pass
    if not torch.isfinite(last).all():
        raise CacheError("the model's logits are not finite at the end of the steps that were timed")
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return Steps(tuple(gaps[skipped:]), (before, Counts.of(cache)), peak, tuple(chosen[skipped:]))


def replayed(model: PreTrainedModel, cache: DynamicCache, steps: str) -> ElasticGraph | None:
    """Set how a cache takes its next steps, one of STEPS. Returns its ElasticGraph; None for eager steps."""
    if not isinstance(cache, Cache):
        return None
    cache.replay = None
    if steps == "captured":
        cache.replay = ElasticGraph(fusing(model, model.forward), cache, capture=capturable(cache) is None)
    return cache.replay


def hf_cache(model: PreTrainedModel, method: str) -> DynamicCache:
    """Make one of transformers' own caches.

    hf-offloaded fetches a layer's KV on a stream that does not wait for its copy to the host (transformers 5.17 to 5.23).
    It may read memory that is not written yet, even NaN, unless the device idles between steps.
    """
    return DynamicCache(config=model.config, offloading=method == "hf-offloaded")


@contextmanager
def attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Context in which the model uses another attention function."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
