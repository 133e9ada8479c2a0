"""Time to first and second token, time per output token and memory, for methods side by side on one model.

Lines say everything of a run; `kvthaw.bench.settings` what can be asked for, `kvthaw.bench.lines` what is measured,
`kvthaw.bench.check` what must hold before.
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvthaw.bench import room
from kvthaw.bench.asked import Decode
from kvthaw.bench.card import bandwidths, provenance
from kvthaw.bench.check import Checks, attention, hf_cache, hits_as_asked
from kvthaw.bench.fill import Tokens, drawn, fill
from kvthaw.bench.launches import launches
from kvthaw.bench.lines import Line, Lines
from kvthaw.bench.options import read_pairs
from kvthaw.bench.replayed import Record
from kvthaw.bench.script import noted, parted, printing, run_as_script
from kvthaw.bench.scripted import scripted
from kvthaw.bench.settings import HF, Setting, grid, groups, possible
from kvthaw.bench.shapes import build
from kvthaw.bench.steps import Decoder, Steps, most_warm, parts, prefill, random_tokens, take
from kvthaw.cache.dense import DenseLayer
from kvthaw.engine.decode import compiled_step
from kvthaw.engine.hf import Cache
from kvthaw.errors import CacheError, ConfigError
from kvthaw.types import ReadsStore

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Watch = Callable[[str, int, int], None]
"""Is told what is measured next, how many settings are done, and of how many."""


def main(
    *asked: Decode,
    say: Callable[[Line], None] | None = None,
    watch: Watch | None = None,
    note: Callable[[str], None] = noted,
) -> list[Line]:
    """Measure what was asked for, one after the other with models built and compiled once, each line given to `say` as soon as it
    is known. `out` and what lines say of the code are the first's. Raises ConfigError, before anything is built, for settings that
    cannot be or do not fit. A setting that fails leaves the others their turn: `note` is told, and the error raised at the end."""
    device, dtype = where()
    known = Lines(asked[0].out)
    grids = []
    for options in asked:
        asked_for = grid(options, name_of(device))
        wanted = [one for one in asked_for if possible(one, device.type == "cuda")]
        if not wanted:
            ways, methods = ",".join(options.steps), ",".join(options.method)
            raise ConfigError(f"steps is {ways}; on {device.type} none of them is possible with {methods}")
        left = dict.fromkeys((one.steps, one.method) for one in asked_for if one not in wanted)
        for steps in dict.fromkeys(steps for steps, _ in left):
            note(f"left out, not possible on {device.type}: {steps} steps of {', '.join(m for s, m in left if s == steps)}")
        for one in wanted:
            if known.get(one) is None:
                room.check(one, device, dtype, options.host_bytes)
        grids.append(wanted)
    _check_profiled([(one, options.profile) for options, wanted in zip(asked, grids, strict=True) for one in wanted], known)
    bench, found = Bench(known, commit=asked[0].commit), []
    for options, wanted in zip(asked, grids, strict=True):
        bench.host_bytes, bench.profile = options.host_bytes, options.profile
        lines = bench.run(wanted, say=say, watch=watch, note=note)
        if options.plot is not None:
            from kvthaw.bench import report

            report.plot(lines, options.plot)
        found += lines
    bench.judge()
    return found


def _check_profiled(asked: list[tuple[Setting, bool]], known: Lines) -> None:
    """Refuse to time anything after a profile, whose traces stay in the process."""
    missing = {one: profiled and one.steps != "eager" for one, profiled in asked if known.get(one) is None}
    before: Setting | None = None
    for one, profiled in missing.items():
        if before is not None:
            raise ConfigError(
                f"profile is on for {before}; the profiler stays in the process and would slow {one} after it, so ask for one way "
                "to decode in a run (more can have the same out)"
            )
        before = one if profiled else None


def where() -> tuple[torch.device, torch.dtype]:
    """The device to measure and the dtype of models there."""
    cuda = torch.cuda.is_available()
    return torch.device("cuda" if cuda else "cpu"), torch.bfloat16 if cuda else torch.float32


def name_of(device: torch.device) -> str:
    """What a setting calls a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


class Bench:
    """Measures settings on one model after the other, what is known already not again. A model is built and compiled once."""

    def __init__(
        self, known: Lines, *, commit: str | None = None, host_bytes: int | None = None, profile: bool = False
    ) -> None:
        self.known, self.host_bytes, self.profile = known, host_bytes, profile
        self.device, _ = where()
        self.about = {**provenance(commit), **bandwidths(self.device)}
        self._shape: tuple[str, int] | None = None
        self._failed: list[tuple[Setting, Exception]] = []
        self.text: Record | None = None

    def run(
        self,
        settings: list[Setting],
        *,
        say: Callable[[Line], None] | None = None,
        watch: Watch | None = None,
        note: Callable[[str], None] = noted,
    ) -> list[Line]:
        """The lines of all settings, in order, but of those that fail; of which `note` is told, see judge."""
        done = 0
        for group in groups(settings):
            missing = [one for one in group if self.known.get(one) is None]
            for one in group:
                line = self.known.get(one)
                if line is not None and say is not None:
                    say(line)
            if missing:
                if watch is not None:
                    watch(str(missing[0]), done, len(settings))
                try:
                    for line in self._measure(missing):
                        self.known.add(line)
                        if say is not None:
                            say(line)
                except Exception as error:  # hours of others' times are not lost for it
                    traceback.clear_frames(error.__traceback__)  # which hold caches
                    self._failed.append((missing[0], error))
                    note(f"failed: {missing[0]}: {type(error).__name__}: {error}")
                    free()
            done += len(group)
        return [line for one in dict.fromkeys(settings) if (line := self.known.get(one)) is not None]

    def judge(self) -> None:
        """Raise what a setting failed with; CacheError with all of it where several did."""
        if len(self._failed) == 1:
            raise self._failed[0][1]
        if self._failed:
            raise CacheError(
                f"{len(self._failed)} settings failed: " + "; ".join(f"{one}: {error}" for one, error in self._failed)
            )

    @torch.no_grad()
    def _measure(self, group: list[Setting]) -> Iterator[Line]:
        self._build(group[0])
        with attention(self.model, "sdpa"):
            for one in group:
                self.check(one)
        with attention(self.model, "sdpa"):  # again: the checks' caches brought kvthaw's
            yield from self._lines(group)

    def _build(self, one: Setting) -> None:
        if self._shape == (one.shape, one.seed):
            return
        self.model: PreTrainedModel
        self.check: Checks
        if self._shape is not None:
            del self.model, self.check
            self.text = None
            free()
        self.model = build(one.shape, self.device, seed=one.seed)
        self.forwards = {"captured": self.model.forward, "compiled": compiled_step(self.model.forward)}
        self.check = Checks(self.model, self.forwards)
        self._shape = one.shape, one.seed

    def _cache(self, one: Setting) -> DynamicCache:
        if one.hf:
            return hf_cache(self.model, one.method)
        method = one.resolved()
        if one.hits is not None:
            method = scripted(method, one.hits)
        if one.prompt == "text" and method.index is not None:
            method = self._record(one).asked(method)
        return Cache(self.model, method, **one.sizes(), host_bytes=self.host_bytes)

    def _lines(self, group: list[Setting]) -> Iterator[Line]:
        one = group[0]
        tokens = random_tokens(self.model, one.batch, one.seed)
        if one.prompt != "text":
            self.text = None  # it takes a gigabyte of the device
        free()
        cache, begun = self._prefilled(one, tokens) if one.prompt == "run" else self._filled(one)
        for setting in group:
            forward = self.forwards.get(setting.steps)
            decoder = Decoder(self.model, cache, forward=forward, compiled=setting.steps == "compiled")
            taken = take(decoder, tokens, setting.new_tokens)
            more: dict[str, Any] = {}
            if decoder.replay is not None:
                replay = decoder.replay
                more |= {
                    "captures": replay.captures,
                    "capture_s": replay.capture_seconds,
                    "capture_bytes": replay.capture_bytes,
                }
                if self.profile:
                    more |= launches(lambda: decoder.logits(next(tokens)))  # noqa: B023 - called at once
            elif isinstance(cache, Cache):
                more["parts_s"] = parts(self.model, cache, tokens)
            line = self._line(setting, cache, taken, {**begun, **more})
            hits_as_asked(setting, line.hit_rate)
            yield line
        del cache
        free()

    def _filled(self, one: Setting) -> tuple[DynamicCache, dict[str, float | None]]:
        """A cache that was filled, and how long that took."""
        cache = self._cache(one)
        begin = time.perf_counter()
        record = self._record(one) if one.prompt == "text" else None

        def made(layer: int) -> Tokens:
            return drawn(self.model, layer, one.length, one.seed) if record is None else record.tokens(layer, one.length)

        same = made(0) if one.shared else None

        def tokens(layer: int) -> Tokens:
            return same or made(layer)

        fill(cache, tokens, batch=one.batch, shared=one.shared, coming=one.new_tokens + most_warm(self.device))
        nothing = dict.fromkeys(("ttft_s", "tt2t_s", "cold_ttft_s", "cold_tt2t_s"))
        return cache, {**nothing, "fill_s": time.perf_counter() - begin}

    def _record(self, one: Setting) -> Record:
        if self.text is None or self.text.length != min(one.length, self.text.most):
            self.text = Record(self.model.config, one.length, self.device)
        return self.text

    def _prefilled(self, one: Setting, tokens: Iterator[Tensor]) -> tuple[DynamicCache, dict[str, float | None]]:
        """A cache after its prompt, and the times of that and of a cold run before."""
        generator = torch.Generator().manual_seed(one.seed + one.length)
        ids = torch.randint(0, self.model.config.vocab_size, (one.batch, one.length), generator=generator).to(self.device)
        found: dict[str, float | None] = {"fill_s": None}
        for name in ("cold_", ""):
            cache = self._cache(one)
            first = prefill(self.model, cache, ids)
            second = take(Decoder(self.model, cache), tokens, 1, warm=0).mean
            found |= {f"{name}ttft_s": first, f"{name}tt2t_s": first + second}
            if name:
                take(Decoder(self.model, cache), tokens, 3, warm=0)
                del cache
                free()
        return cache, found

    def _line(self, one: Setting, cache: DynamicCache, taken: Steps, more: dict[str, Any]) -> Line:
        """Everything of one way to take steps."""
        model, config = self.model, self.model.config.get_text_config(decoder=True)
        before, after = taken.counts
        steps = len(taken.gaps)
        token = 2 * config.num_key_value_heads * config.head_dim * model.dtype.itemsize * one.batch  # of one layer
        full = token * config.num_hidden_layers * cache.get_seq_length()
        held = _held(cache, full)
        selected = after.selected - before.selected
        fetched, stored = ((getattr(after, f) - getattr(before, f)) / steps for f in ("fetched_bytes", "stored_bytes"))
        if one.method == HF[1]:
            fetched = stored = float(full)  # every layer comes, and leaves whole
        frozen = config.num_hidden_layers - held["dense_layers"]
        attended = token * frozen * (held["attended_mean"] or 0.0) + held["kv_dense_bytes"]
        moved = _weights(model) + (full if one.hf else attended)
        device_s = moved / self.about["device_bytes_per_s"]
        bus = self.about["bus_bytes_per_s"]
        bus_s = None if bus is None else fetched / bus
        floor = max(device_s, bus_s or 0.0)
        mine = full * frozen / config.num_hidden_layers
        on_device = held["kv_device_bytes"] + held["index_device_bytes"]
        return Line(
            setting=one,
            tpot_s=taken.mean,
            itl_p50_s=taken.quantile(0.5),
            itl_p95_s=taken.quantile(0.95),
            elapsed_s=taken.elapsed(),
            tokens_per_s=one.batch / taken.mean,
            peak_device_bytes=taken.peak,
            weight_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
            full_kv_bytes=full,
            share_of_full=on_device / mine if mine else None,
            share_with_dense=(on_device + held["kv_dense_bytes"]) / full,
            hit_rate=1 - (after.fetched - before.fetched) / selected if selected else None,
            fetched_bytes=fetched,
            stored_bytes=stored,
            searched_bytes=(searched := _searched(cache)),
            bus_bytes=fetched + stored + searched,
            floor_device_s=device_s,
            floor_bus_s=bus_s,
            floor_s=floor,
            floor_ratio=taken.mean / floor,
            about=self.about,
            **held,
            **more,
        )


def _held(cache: DynamicCache, full: int) -> dict[str, Any]:
    """What a cache holds where, and what it attended to."""
    if not isinstance(cache, Cache):
        offloaded = bool(getattr(cache, "offloading", False))
        names = ("attended_mean", "attended_max", "retrieved", "budget", "index_host_bytes")
        return {
            **dict.fromkeys(names),
            "dense_layers": len(cache.layers),
            "kv_device_bytes": 0,
            "index_device_bytes": 0,
            "kv_dense_bytes": 2 * full // len(cache.layers) if offloaded else full,
            "kv_host_bytes": full if offloaded else 0,
            "kv_frozen_bytes": full if offloaded else 0,
        }
    stats, layers = cache.stats(), cache.frozen_layers
    here = [kv for kv in layers if kv.slab.data.is_cuda or not _on_host(kv)]
    tensors = {t.data_ptr(): t.nbytes for kv in here for t in kv.tensors() if t.device == kv.slab.data.device}
    slabs = {t.data_ptr(): t.nbytes for kv in layers for t in (kv.slab.data, kv.slab.tickets)}
    extents = {int(at): kv.store for kv in layers for lane in range(kv.lanes) for at in kv.store.addresses(lane)}
    host_index = [kv.group.index for kv in layers if kv.group is not None and kv.leader is None and _on_host(kv)]
    told = [index.nbytes() for index in host_index if hasattr(index, "nbytes")]
    return {
        **{name: getattr(stats, name) for name in ("attended_mean", "attended_max", "retrieved", "budget", "dense_layers")},
        "kv_device_bytes": stats.kv_device_bytes,
        "index_device_bytes": sum(size for at, size in tensors.items() if at not in slabs),
        "kv_dense_bytes": sum(kv.device_bytes() for kv in cache.kv_layers if isinstance(kv, DenseLayer)),
        "kv_host_bytes": sum(store.kv_heads * store.extent * store.row_bytes for store in extents.values()),
        "kv_frozen_bytes": sum(
            kv.store.kv_heads * kv.store.row_bytes * kv.store.length(lane) for kv in layers for lane in range(kv.lanes)
        ),
        "index_host_bytes": sum(told) if told and len(told) == len(host_index) else None,
    }


def _searched(cache: DynamicCache) -> float:
    """Bytes that the indexes of a cache read from the host in a step."""
    groups = [kv.group for kv in cache.frozen_layers if kv.leader is None] if isinstance(cache, Cache) else []
    return float(sum(group.index.searched_bytes() for group in groups if group and isinstance(group.index, ReadsStore)))


def _on_host(kv: Any) -> bool:
    return kv.group is not None and kv.group.index.on_host


def _weights(model: PreTrainedModel) -> int:
    """Bytes of weights that a step reads: all but a table of input embeddings of its own, of which it reads a row a token."""
    tables = {id(p) for p in model.get_input_embeddings().parameters()}
    output = model.get_output_embeddings()
    tied = {id(p) for p in output.parameters()} if output is not None else set()
    return sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in tables - tied)


def free() -> None:
    """Give back what is held for nothing."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":  # name=value ..., several runs in one process with -- between them
    asked = [read_pairs(Decode, one) for one in parted(sys.argv[1:])]
    run_as_script(lambda: main(*asked, **printing(asked[0].out)))
