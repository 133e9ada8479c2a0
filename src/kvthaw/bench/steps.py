"""Steps of one cache, taken and timed one way: eagerly, replayed from a CUDA graph, or compiled and replayed if they can be."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvthaw.engine.decode import Replay, capturable
from kvthaw.engine.hf import Cache
from kvthaw.errors import CacheError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WARM = 6
"""Steps of each way that do not count, at least: kernels are compiled and tuned in them, and graphs captured."""
_PATIENCE = 6.0
"""Seconds after which no more of them are taken than WARM."""


def most_warm(device: torch.device) -> int:
    """At most: the first tokens that leave a ring leave uncounted, for that compiles kernels too; on a CPU if they do so soon."""
    return 640 if device.type == "cuda" else 40


class Decoder:
    """Takes single tokens of a cache, in one of STEPS, and draws the next one's ids at random: random weights that choose
    their own tokens soon repeat one. forward: the model's own or that compiled; None is eager."""

    def __init__(
        self, model: PreTrainedModel, cache: DynamicCache, *, forward: Callable[..., Any] | None = None, compiled: bool = False
    ) -> None:
        self.model, self.cache = model, cache
        self.replay: Replay | None = None
        if forward is not None:
            assert isinstance(cache, Cache)
            self.replay = Replay(forward, cache, compiled=compiled, capture=capturable(cache) is None)

    def logits(self, ids: Tensor) -> Tensor:
        """Of the last token, [B, V]. ids: [B, 1], the one before it; valid until the next step."""
        if self.replay is None:
            out: Tensor = self.model(ids, past_key_values=self.cache, logits_to_keep=1).logits
        else:
            out = self.replay(ids, torch.full_like(ids, self.cache.get_seq_length()))
        return out[:, -1]


@dataclass(frozen=True, slots=True)
class Steps:
    """What some steps took. gaps: seconds of each, the device at rest between them. counts: before and after. peak: bytes."""

    gaps: tuple[float, ...]
    counts: tuple[Counts, Counts]
    peak: int | None

    @property
    def mean(self) -> float:
        """Seconds a step, updates counted."""
        return statistics.mean(self.gaps)

    def quantile(self, share: float) -> float:
        """The gap that so large a share of the others does not exceed."""
        return sorted(self.gaps)[min(len(self.gaps) - 1, round(share * len(self.gaps)))]

    def elapsed(self) -> dict[str, float]:
        """Seconds after 16, 32, 64 ... and all steps."""
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
        layers = cache.frozen_layers
        groups = {id(kv.group): kv.group for kv in layers if kv.group is not None}.values()
        stored = [(kv.store, kv.store.length(lane)) for kv in layers for lane in range(kv.lanes)]
        return Counts(
            sum(group.meter.selected for group in groups),
            sum(group.meter.fetched for group in groups),
            sum(kv.group.meter.fetched * kv.store.row_bytes for kv in layers if kv.group is not None),
            sum(store.kv_heads * store.row_bytes * length for store, length in stored),
        )


def prefill(model: PreTrainedModel, cache: DynamicCache, ids: Tensor) -> float:
    """Process a prompt [B, T]; seconds until its first token is known."""
    synchronize(model.device)
    begin = time.perf_counter()
    model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(dim=-1)
    synchronize(model.device)
    return time.perf_counter() - begin


def warm_steps(cache: DynamicCache) -> int:
    """Steps of a cache that do not count: WARM, or up to most_warm() if tokens leave a ring of its layers by then."""
    layers = cache.frozen_layers if isinstance(cache, Cache) else []
    most = [most_warm(kv.slab.data.device) - 1 for kv in layers]
    first = [(kv.undisturbed(steps), steps) for kv, steps in zip(layers, most, strict=True)]
    return max([WARM, *(steps + 2 for steps, limit in first if steps < limit)])


def take(decoder: Decoder, tokens: Iterator[Tensor], count: int, warm: int | None = None) -> Steps:
    """Take `warm` steps that do not count, as `warm_steps` has it if None (fewer where they are slow), and `count` that do. Raises
    CacheError where logits were not finite at the end."""
    device, warm = decoder.model.device, warm_steps(decoder.cache) if warm is None else warm
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    logits = torch.zeros(1)

    def step() -> float:
        nonlocal logits
        ids = next(tokens)
        synchronize(device)
        begin = time.perf_counter()
        logits = decoder.logits(ids)
        logits.argmax(dim=-1)
        synchronize(device)
        return time.perf_counter() - begin

    for _ in range(min(warm, WARM)):
        step()
    begin = time.perf_counter()  # behind all that is compiled and captured
    for _ in range(warm - WARM):
        if time.perf_counter() - begin >= _PATIENCE:
            break
        step()
    before = Counts.of(decoder.cache)
    gaps = tuple(step() for _ in range(count))
    if not torch.isfinite(logits).all():
        raise CacheError("the model's logits are not finite at the end of the steps that were timed")
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return Steps(gaps, (before, Counts.of(decoder.cache)), peak)


def random_tokens(model: PreTrainedModel, batch: int, seed: int) -> Iterator[Tensor]:
    """Ids [B, 1] of random tokens, drawn by hundreds so that a step does not wait for them."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        drawn = torch.randint(0, model.config.vocab_size, (128, batch, 1), generator=generator)
        yield from drawn.to(model.device)


def parts(model: PreTrainedModel, cache: Cache, tokens: Iterator[Tensor], steps: int = 16) -> dict[str, float]:
    """Seconds an eager step spends in searching the index ("query"), residency and fetching rows, what else it spends in kvthaw's
    layers ("attention", and the ring's updates among these steps), and "model", all the rest. The device is idle before each."""
    spent: dict[str, float] = {}
    with _timed(cache, spent, model.device):
        decoder = Decoder(model, cache)
        synchronize(model.device)
        begin = time.perf_counter()
        for _ in range(steps):
            decoder.logits(next(tokens))
        synchronize(model.device)
        whole = time.perf_counter() - begin
    layers = spent.pop("layers")
    spent |= {"attention": layers - sum(spent.values()), "model": whole - layers}
    return {part: seconds / steps for part, seconds in spent.items()}


@contextmanager
def _timed(cache: Cache, spent: dict[str, float], device: torch.device) -> Iterator[None]:
    def timed(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            synchronize(device)
            begin = time.perf_counter()
            result = call(*args)
            synchronize(device)
            spent[part] = spent.get(part, 0.0) + time.perf_counter() - begin
            return result

        return wrapper

    wrapped: list[tuple[Any, str]] = []

    def wrap(owner: Any, name: str, part: str) -> None:
        wrapped.append((owner, name))
        setattr(owner, name, timed(part, getattr(owner, name)))

    for kv in cache.kv_layers:
        wrap(kv, "attend", "layers")
    for layer in cache.frozen_layers:
        if layer.group is None or layer._transfer is None:
            continue
        wrap(layer._transfer, "fetch", "fetch")
        if layer.leader is None:
            wrap(layer.group.index, "select", "query")
            wrap(layer.group.residency, "admit", "residency")
    try:
        yield
    finally:
        for owner, name in wrapped:
            delattr(owner, name)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
