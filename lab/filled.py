"""The decode benchmark for caches that begin without a prefill, and for steps whose rows follow a script."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import DynamicCache

from kvthaw.bench.decode import Measures
from kvthaw.bench.settings import HF
from kvthaw.bench.steps import hf_cache, most_warm
from kvthaw.engine.decode import decode
from kvthaw.engine.hf import Cache
from kvthaw.errors import CacheError, ConfigError
from kvthaw.evaluate.machine import where
from kvthaw.evaluate.results import Record
from lab import room
from lab.bench.check import LENGTH, PROMPT, Checks
from lab.bench.settings import ShapeSetting
from lab.bench.shaped import ShapeBench
from lab.fill import Tokens, drawn, fill
from lab.launches import launches
from lab.replayed import Record as Text
from lab.scripted import scripted

_FEW = 20  # steps that show whether a filled cache goes on, past an update of a ring, whose kernels are compiled then


def check_profiled(settings: Sequence[ShapeSetting]) -> None:
    """Refuse to time anything after a profile, whose traces stay in the process."""
    if len([one for one in settings if one.steps != "eager"]) > 1:
        raise ConfigError("the profiler stays in the process and would slow what comes after it: profile one setting in a run")


class FilledChecks(Checks):
    """As Checks; and a filled cache goes on as after a prefill of the same keys and values."""

    def __call__(self, setting: ShapeSetting) -> None:
        super().__call__(setting)
        if setting.method not in HF and setting.prompt != "run":
            self.once((setting.method, setting.dense_layers), lambda: self._goes_on(setting))

    def _goes_on(self, setting: ShapeSetting) -> None:
        run, filled = (self.cache(setting, LENGTH // 4) for _ in range(2))
        self.model(self.ids[:, :PROMPT], past_key_values=run)
        fill(filled, lambda number: taken(run, number))
        theirs, ours = (self.decode(cache, "eager", _FEW) for cache in (run, filled))
        self.near(ours, setting, "itself after a prefill of the same keys", theirs)

    def begun(self, setting: ShapeSetting) -> DynamicCache:
        cache = hf_cache(self.model, setting.method)
        if setting.prompt != "run":
            run = Cache(self.model, "full")
            self.model(self.ids[:, :PROMPT], past_key_values=run)
            fill(cache, lambda number: taken(run, number))
        return cache


class FilledBench(ShapeBench):
    """A ShapeBench that also takes settings with prompt "filled" or "text", with hits and with shared host rows.

    profile: break captured steps down by kernels, after those that count.
    unchecked: logits are not compared with transformers' first.
    """

    checks = FilledChecks
    profile = unchecked = False
    text: Text | None = None

    def prepare(self, shape: str, seed: int = 0) -> None:
        super().prepare(shape, seed)
        if self.unchecked:
            self.check = lambda setting: None

    def run(self, settings: Sequence[ShapeSetting]) -> list[Record]:
        if self.profile:
            check_profiled(settings)
        return super().run(settings)

    def fits(self, one: ShapeSetting) -> bool:
        """Whether a setting is known or fits on the machine; what does not is noted."""
        if self.known.get(one.to_dict()) is None:
            device, _ = where()
            try:
                room.check(one, device, torch.bfloat16 if device.type == "cuda" else torch.float32, self.host_bytes)
            except ConfigError as error:
                self.note(str(error))
                return False
        return True

    def cache(self, one: ShapeSetting) -> DynamicCache:
        if one.hf:
            return super().cache(one)
        method = one.resolved()
        if one.hits is not None:
            method = scripted(method, one.hits)
        if one.prompt == "text" and method.index is not None:
            method = self._text(one).asked(method)
        return Cache(self.model, method, config=replace(one.config, host_bytes=self.host_bytes))

    def begin(self, one: ShapeSetting, tokens: Iterator[Tensor]) -> tuple[DynamicCache, Measures]:
        if one.prompt != "text":
            self.text = None  # it takes a gigabyte of the device
        if one.prompt in ("run", "once"):
            return super().begin(one, tokens)
        cache, begin = self.cache(one), time.perf_counter()
        text = self._text(one) if one.prompt == "text" else None

        def made(layer: int) -> Tokens:
            return drawn(self.model, layer, one.length, one.seed) if text is None else text.tokens(layer, one.length)

        same = made(0) if one.shared else None
        coming = one.new_tokens + most_warm(self.device)
        fill(cache, lambda layer: same or made(layer), batch=one.batch, shared=one.shared, coming=coming)
        nothing = dict.fromkeys(("ttft_s", "tt2t_s", "cold_ttft_s", "cold_tt2t_s"))
        return cache, {**nothing, "fill_s": time.perf_counter() - begin}

    def more(self, one: ShapeSetting, cache: DynamicCache, tokens: Iterator[Tensor]) -> Measures:
        if not self.profile or one.steps == "eager":
            return {}
        steps = decode(self.model, cache, torch.empty(0), lambda logits: next(tokens))
        return launches(lambda: next(steps))

    def _records(self, group: list[ShapeSetting]) -> Iterator[Record]:
        for record in super()._records(group):
            hits_as_asked(ShapeSetting(**record.setting), record["hit_rate"])
            yield record

    def _text(self, one: ShapeSetting) -> Text:
        if self.text is None or self.text.length != min(one.length, self.text.most):
            self.text = Text(self.model.config, one.length, self.device)
        return self.text


def taken(cache: Cache, number: int) -> Tokens:
    """A layer's tokens, of a cache that has only had a prompt of one row."""
    kv = cache.kv.layers[number]
    queries, sequences = kv.recent_queries[0][None], cache.kv.sequences
    return Tokens(number, kv.read(0, 0, sequences.length(0))[None].to(queries.device), queries, kv.scale)


def hits_as_asked(setting: ShapeSetting, found: float | None) -> None:
    """Raise CacheError where steps of a script did not find the share of their rows on the device that it gives them, to a row.
    What a method does not keep (`keep=0`) it never finds."""
    if setting.hits is None:
        return
    expected = setting.hits if setting.resolved().keep else 0.0
    rows = setting.budget if isinstance(setting.budget, int) else setting.retrieved
    if found is None or abs(found - expected) > 0.02 + (1 / rows if rows else 0):
        raise CacheError(f"{setting.method} found {found} of its rows on the device; hits is {setting.hits}")
