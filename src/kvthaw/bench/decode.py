"""Time to first and second token, time per output token and memory, for methods side by side on one model."""

from __future__ import annotations

import gc
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from kvthaw.bench.settings import HF, DecodeSetting, groups, possible
from kvthaw.bench.steps import Steps, attention, hf_cache, prefill, replayed, take
from kvthaw.engine.hf import Cache, DynamicCache, PreTrainedModel
from kvthaw.engine.hf.model import kv_bytes
from kvthaw.errors import CacheError, ConfigError
from kvthaw.evaluate.machine import provenance, where
from kvthaw.evaluate.results import Record, ResultsFile, noted

Watch = Callable[[str, int, int], None]
"""Called with the setting that is measured next or was measured last, the number of settings done, and their total."""
Measures = dict[str, Any]
S = TypeVar("S", bound=DecodeSetting)


class Bench(ABC, Generic[S]):
    """Measure settings of a model, except settings with known results.

    host_bytes: as for `kvthaw.Cache`.
    tp: number of processes that the model is split over, which all run the same. Bytes are then per process.
    say: called with each record as soon as it is known.
    watch: called with the setting that is measured.
    note: called with settings that were left out or failed.
    """

    attends = "sdpa"
    """transformers' attention function, for its own caches and the prompts."""
    model: PreTrainedModel
    warm: int | None = None
    """Steps that do not count, None as `take` has it."""

    def __init__(
        self,
        known: ResultsFile,
        *,
        host_bytes: int | None = None,
        tp: int = 1,
        say: Callable[[Record], None] = lambda record: None,
        watch: Watch = lambda what, done, of: None,
        note: Callable[[str], None] = noted,
        device: str | None = None,
    ) -> None:
        self.known, self.host_bytes, self.tp, self.say, self.watch, self.note = known, host_bytes, tp, say, watch, note
        self.device, _ = where(device)
        self.about = provenance()
        self._failed: list[tuple[S, Exception]] = []

    def run(self, settings: Sequence[S]) -> list[Record]:
        """Return the records of all settings, in order, except settings that the device cannot run or that fail; see judge.

        Raises ConfigError, before anything is built, if the device can run none of them.
        """
        wanted = [one for one in settings if possible(one, self.device.type == "cuda")]
        if not wanted:
            asked = ", ".join(map(str, settings))
            raise ConfigError(f"on {self.device.type} none of these is possible: {asked}")
        for one in settings:
            if one not in wanted:
                self.note(f"left out, not possible on {self.device.type}: {one}")
        done = 0
        for group in groups(wanted):
            missing = [one for one in group if self.known.get(one.to_dict()) is None]
            for one in group:
                record = self.known.get(one.to_dict())
                if record is not None:
                    self.say(record)
            self.watch(str(group[0]), done, len(wanted))
            if missing:
                try:
                    for record in self._measure(missing):
                        self.known.add(record)
                        self.say(record)
                except Exception as error:  # hours of others' times are not lost for it
                    traceback.clear_frames(error.__traceback__)  # which hold caches
                    self.failed(missing[0], error)
                    free()
            done += len(group)
            self.watch(str(group[-1]), done, len(wanted))
        return [found for one in dict.fromkeys(wanted) if (found := self.known.get(one.to_dict())) is not None]

    def failed(self, one: S, error: Exception) -> None:
        """Record a setting's error for judge(), or note that the setting is left out."""
        if one.hf:
            self.note(f"left out, transformers' own cache fails: {one}: {error}")
        else:
            self._failed.append((one, error))
            self.note(f"failed: {one}: {type(error).__name__}: {error}")

    def judge(self) -> None:
        """Raise the error of a failed setting, or a CacheError with all errors if several failed."""
        failed, self._failed = self._failed, []
        if len(failed) == 1:
            raise failed[0][1]
        if failed:
            each = "; ".join(f"{one}: {error}" for one, error in failed)
            raise CacheError(f"{len(failed)} settings failed: {each}")

    @torch.no_grad()
    def _measure(self, group: list[S]) -> Iterator[Record]:
        with attention(self.model, self.attends):
            yield from self._records(group)

    def cache(self, one: S) -> DynamicCache:
        """Return an empty cache of a setting."""
        if one.hf:
            return hf_cache(self.model, one.method)
        return Cache(self.model, one.resolved(), config=replace(one.config, host_bytes=self.host_bytes))

    def runs(self, one: S) -> Sequence[str]:
        """Return the prefixes of the measures of each run of a prompt. A cold one comes first; it compiles kernels and touches host
        memory first."""
        return "cold_", ""

    def begin(self, one: S, tokens: Iterator[Tensor]) -> tuple[DynamicCache, Measures]:
        """Return a cache after its prompt, and the seconds until the first and the second token; see runs()."""
        ids = self.prompt(one)
        found: Measures = {"fill_s": None, "ttft_s": None, "tt2t_s": None}
        names = self.runs(one)
        for name in names:
            cache, each = self.cache(one), tokens if name == names[-1] else self.tokens(one)
            first = prefill(self.model, cache, ids)
            second = take(self.model, cache, each, 1, warm=0, capture=False).mean
            found |= {f"{name}ttft_s": first, f"{name}tt2t_s": first + second}
            if name != names[-1]:
                self.heat(one, cache, each)
                del cache
                free()
        return cache, found

    @abstractmethod
    def prompt(self, one: S) -> Tensor:
        """Return the ids [B, T] of a setting's prompt."""

    def heat(self, one: S, cache: DynamicCache, tokens: Iterator[Tensor]) -> None:
        """Run the steps of a cold run."""
        take(self.model, cache, tokens, 3, warm=0, capture=False)

    def more(self, one: S, cache: DynamicCache, tokens: Iterator[Tensor]) -> Measures:
        """Return what else is measured of a setting, after its steps."""
        return {}

    @abstractmethod
    def tokens(self, one: S) -> Iterator[Tensor]:
        """Return the ids [B, 1] of each step."""

    def _records(self, group: list[S]) -> Iterator[Record]:
        one = group[0]
        tokens = self.tokens(one)
        free()
        cache, begun = self.begin(one, tokens)
        for setting in group:
            replay = replayed(self.model, cache, setting.steps)
            taken = take(self.model, cache, tokens, setting.new_tokens, self.warm, capture=setting.steps != "eager")
            measures = {**begun, **self.taken(setting, cache, taken), **self.more(setting, cache, tokens)}
            if replay is not None:
                captured = {"captures": replay.captures, "capture_s": replay.capture_seconds}
                measures |= {**captured, "capture_bytes": replay.capture_bytes}
            yield Record(setting.to_dict(), {**measures, "about": self.about})
        del cache
        free()

    def taken(self, one: S, cache: DynamicCache, taken: Steps) -> Measures:
        """Return the measures of one way to take steps. Seconds are wall-clock; bytes are of K and V unless stated otherwise.

        tpot_s: the mean of all steps, including steps that update an index.
        itl_*: times of single steps.
        elapsed_s: time of all steps.
        peak_device_bytes: everything that torch allocated during the steps.
        full_kv_bytes: all KV at this length, in layers that attend to everything.
        share_of_full: kv_device_bytes and index_device_bytes, as a share of the same layers' KV.
        share_with_dense: the same with the dense layers, as a share of all KV.
        fetched_bytes, stored_bytes: to and from the device, per step.
        bus_bytes: the sum of these two. What a search reads from the host is not counted.
        """
        (before, after), steps, model = taken.counts, len(taken.gaps), self.model
        growing = [number for number, slides in enumerate(cache.is_sliding) if not slides]
        full, layers = kv_bytes(model, growing) // self.tp * one.batch * cache.get_seq_length(), len(growing)
        held = held_bytes(cache, full)
        selected = after.selected - before.selected
        fetched, stored = ((getattr(after, f) - getattr(before, f)) / steps for f in ("fetched_bytes", "stored_bytes"))
        if one.method == HF[1]:
            fetched = stored = float(full)  # every layer comes, and leaves whole
        mine = full * (layers - held["dense_layers"]) / layers
        on_device = held["kv_device_bytes"] + held["index_device_bytes"]
        return {
            "tpot_s": taken.mean,
            "itl_p50_s": taken.quantile(0.5),
            "itl_p95_s": taken.quantile(0.95),
            "itl_p99_s": taken.quantile(0.99),
            "elapsed_s": taken.elapsed(),
            "tokens_per_s": one.batch / taken.mean,
            "peak_device_bytes": taken.peak,
            "weight_bytes": sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in model.parameters()),
            "full_kv_bytes": full,
            "share_of_full": on_device / mine if mine else None,
            "share_with_dense": (on_device + held["kv_dense_bytes"]) / full,
            "hit_rate": 1 - (after.fetched - before.fetched) / selected if selected else None,
            "fetched_bytes": fetched,
            "stored_bytes": stored,
            "bus_bytes": fetched + stored,
            "captures": None,
            **held,
        }


_STATS = ("attended_mean", "attended_max", "retrieved", "budget", "dense_layers", "kv_device_bytes", "kv_dense_bytes")


def held_bytes(cache: DynamicCache, full: int) -> Measures:
    """Return where a cache holds its bytes, and how much it attended to.

    kv_host_bytes: host memory in use.
    kv_frozen_bytes: KV that this memory represents, which is more if sequences or layers share it.
    index_host_bytes: None if the index does not tell.
    """
    if not isinstance(cache, Cache):
        offloaded, layers = bool(getattr(cache, "offloading", False)), cache.is_sliding.count(False)
        names = ("attended_mean", "attended_max", "retrieved", "budget", "index_host_bytes")
        return {
            **dict.fromkeys(names),
            "dense_layers": layers,
            "kv_device_bytes": 0,
            "index_device_bytes": 0,
            "kv_dense_bytes": 2 * full // layers if offloaded else full,
            "kv_host_bytes": full if offloaded else 0,
            "kv_frozen_bytes": full if offloaded else 0,
        }
    stats, layers = cache.stats(), cache.kv.offloaded
    here = [kv for kv in layers if kv.slab.data.is_cuda or not kv.on_host]
    tensors = {t.data_ptr(): t.nbytes for kv in here for t in kv.tensors() if t.device == kv.slab.data.device}
    slabs = {t.data_ptr(): t.nbytes for kv in layers for t in (kv.slab.data, kv.slab.tickets)}
    blocks = {int(at): kv.store for kv in layers for seq in range(cache.kv.sequences.count) for at in kv.store.table.row(seq)}
    host_index = [kv.own.index for kv in layers if kv.own is not None and kv.on_host]
    told = [index.nbytes() for index in host_index]
    return {
        **{name: getattr(stats, name) for name in _STATS},
        "index_device_bytes": sum(size for at, size in tensors.items() if at not in slabs),
        "kv_host_bytes": sum(store.kv_heads * store.block_size * store.row_bytes for store in blocks.values()),
        "kv_frozen_bytes": sum(
            kv.store.token_bytes * kv.store.length(seq) for kv in layers for seq in range(cache.kv.sequences.count)
        ),
        "index_host_bytes": sum(told) if all(told) and told else None,
    }


def free() -> None:
    """Free unreferenced memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
