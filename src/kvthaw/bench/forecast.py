"""What a model, a method and a length will take of a machine, before there is either: bytes by place, what fits, time a token."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Hashable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from kvthaw.bench.gpus import Basis, Machine, step_seconds
from kvthaw.cache.device_memory import spare
from kvthaw.cache.index_api import Method
from kvthaw.cache.plan import Needs
from kvthaw.config import CacheConfig
from kvthaw.engine.hf import Cache, PreTrainedConfig
from kvthaw.engine.hf.dry_run import weight_bytes
from kvthaw.engine.hf.model import build, kv_heads, positions
from kvthaw.engine.rope_scaling import RopeScaling
from kvthaw.errors import ConfigError
from kvthaw.evaluate.variant import OWN
from kvthaw.method_names import AUTO
from kvthaw.methods import resolve
from kvthaw.methods.auto import Limits, best_on, fastest, largest_share
from kvthaw.methods.options import take
from kvthaw.typecheck import check_type

HITS = 0.7
"""Share of the selected rows that are on the device already, as measured on text."""
_UNIT = 1024
"""Tokens by which the longest prompt is searched."""
_MOST = 1 << 24
_QUANTISED = {8: 8.5, 4: 4.5}
"""Bits per weight including its share of the scales, as in the formats Q8_0 and Q4_0, by the weight's nominal bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The forecast for one method.

    method: its name as given.
    in_force: the method that would attend to the prompt.
    fits: None if the memory is unknown.
    step_s: seconds of a decode step if the share HITS of the selected rows is on the device already.
    step_no_hits_s: the same if none of them is.
    basis: how well the seconds are known. All three are None if nothing was measured.
    longest: the longest prompt that fits, a multiple of 1,024 tokens or all of the model's positions; None if the memory is
        unknown.
    """

    method: str
    in_force: str
    needs: Needs
    fits: bool | None
    step_s: float | None
    step_no_hits_s: float | None
    basis: Basis | None
    longest: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dict, for JSON."""
        return asdict(self) | {"device_bytes": self.needs.device, "host_bytes": self.needs.host}


class Forecaster:
    """Answers for one model on one machine, for `batch` sequences with prompts of a length and answers of `new_tokens` at most.

    weights: bytes of them, for a model that is quantised; None: all weights are of the dtype.
    settings: of a `Cache`; None: the defaults.
    """

    def __init__(
        self, config: PreTrainedConfig, dtype: torch.dtype, machine: Machine, settings: CacheConfig | None = None, *,
        batch: int = 1, new_tokens: int = 256, weights: int | None = None,
    ) -> None:  # fmt: skip
        self.model, self.machine, self.batch = build(config, torch.device("meta"), dtype), machine, batch
        self.new_tokens, self.settings = new_tokens, settings or CacheConfig()
        self._known: dict[Hashable, tuple[Needs, Method]] = {}  # shared with the forecasters that _with() returns
        check_type(int | None, weights=weights)
        self._whole = weight_bytes(self.model)
        self.weights = self._whole if weights is None else weights
        self._read = round(self.weights / self._whole * weight_bytes(self.model, batch))

    @property
    def room(self) -> int | None:
        """Bytes of GPU memory for a cache, after weights and activations, as device_memory="auto" computes it; None if
        unknown."""
        memory = self.machine.gpu_memory
        return None if memory is None else spare(memory - self.weights, memory)

    @property
    def most(self) -> int:
        """The longest prompt that leaves positions for the answer."""
        return min(positions(self.model) or _MOST, _MOST) - self.new_tokens

    def forecast(self, method: str, length: int) -> Forecast:
        """Return the forecast for a method. Raises ConfigError for a length beyond the model's positions."""
        limit = positions(self.model)
        if limit is not None and length + self.new_tokens > limit:
            given = f"length is {length:,} and new_tokens is {self.new_tokens:,}"
            scaled = RopeScaling.for_positions(limit, length + self.new_tokens)
            remedy = "" if scaled is None else f", or scale the positions with --rope-scaling {scaled}"
            raise ConfigError(f"{given}; the model's positions end at {limit:,}: give a shorter prompt{remedy}")
        needs, made = self._needs(method, length)
        in_force = "full" if needs.plan is None else made.name
        asked = take(method, OWN)[0]
        warm, cold = (self._step(in_force if asked == AUTO else asked, needs, length, hits) for hits in (HITS, 0.0))
        fits = self._fits(needs)
        return Forecast(
            method=method,
            in_force=in_force,
            needs=needs,
            fits=fits,
            step_s=warm and warm[0],
            step_no_hits_s=cold and cold[0],
            basis=warm and warm[1],
            longest=None if fits is None else self._longest(method),
        )

    def would_fit(self, method: str, length: int) -> list[str]:
        """Return changes that would make a method fit. Each was tried alone; two are combined only if none suffices alone."""
        found, longest = list[str](), self._longest(method)
        if longest:
            found.append(f"a prompt of at most {longest:,} tokens")
        many = bisect_left(range(1, self.batch), True, key=lambda n: not self._with(batch=n)._holds(method, length))
        if many:
            found.append(f"--batch {many}")
        eight = self._with(settings=replace(self.settings, kv_dtype="fp8"))
        if self.settings.kv_dtype is None and eight._holds(method, length):
            found.append("--kv-dtype fp8")
        smaller = {bits: self._quantised(bits) for bits in _QUANTISED if self.weights == self._whole}
        held = next((bits for bits, one in smaller.items() if one._holds(method, length)), None)
        if held is not None:
            found.append(smaller[held]._weights_as(held))
        elif not found and smaller:
            bits, least = [*smaller.items()][-1]
            if longest := least._longest(method):
                found.append(f"{least._weights_as(bits)}, and a prompt of at most {longest:,} tokens")
        return found

    def _with(self, **changed: Any) -> Forecaster:
        """Return a forecaster that differs in some attributes."""
        twin = copy.copy(self)
        vars(twin).update(changed)
        return twin

    def _quantised(self, bits: int) -> Forecaster:
        return self._with(weights=round(self._whole * _QUANTISED[bits] / (8 * self.model.dtype.itemsize)))

    def _weights_as(self, bits: int) -> str:
        return f"weights of {bits} bits, --weights {self.weights / 2**30:.1f}GiB"

    def _holds(self, method: str, length: int) -> bool:
        return bool(self._fits(self._needs(method, length)[0]))

    def _needs(self, name: str, length: int) -> tuple[Needs, Method]:
        key = name, length, self.batch, self.settings, self.weights
        if key not in self._known:
            self._known[key] = self._compute_needs(name, length)
        return self._known[key]

    def _compute_needs(self, name: str, length: int) -> tuple[Needs, Method]:
        machine, (name, own) = self.machine, take(name, OWN)
        if "budget" in own or "retrieved" in own:
            own = {"budget": None, "retrieved": None} | own
        settings, names = replace(self.settings, **own), [name]
        if name == AUTO:
            best = best_on("cpu" if machine.cpu else machine.gpu.name if machine.gpu else "")
            names = list(best.methods)
            settings = replace(settings, full_below=best.crossing, device_memory=settings.device_memory or "auto")
        methods = [resolve(one) for one in names]
        chosen = fastest(methods, lambda method: self._needs_of(method, length, settings), self._limits)
        reason = "; ".join(filter(None, (chosen.needs.reason, chosen.reason)))
        return replace(chosen.needs, reason=reason), chosen.method

    def _needs_of(self, method: Method, length: int, settings: CacheConfig) -> Needs:
        cpu = self.machine.cpu
        if method.index is None:
            settings = replace(settings, retrieved=None)
        if method.dense:  # --kv-dtype is for the others; an option of its own name is refused
            settings = replace(settings, budget=None, kv_dtype=None)
        if settings.device_memory == "auto":
            settings = replace(settings, device_memory=None if cpu else self.room)
        return Cache(self.model, method, config=settings).needs(self.batch, length, self.new_tokens, pinned=not cpu)

    def _limits(self, needs: Needs) -> Limits:
        host = needs.host + (needs.device + self.weights if self.machine.cpu else 0)
        limits = {"device": (needs.device, self.room), "host": (host, self.machine.host_memory)}
        return {place: (need, limit) for place, (need, limit) in limits.items() if limit is not None}

    def _fits(self, needs: Needs) -> bool | None:
        known = [need <= limit for need, limit in self._limits(needs).values()]
        return all(known) if known else None

    def _longest(self, method: str) -> int:
        """Return the longest prompt that fits, where the line through two known needs reaches the limit; every third time by
        halving."""
        if (at_high := self._over(method, self.most)) <= 1:
            return self.most
        low, high = 1, self.most // _UNIT + 1
        if high == low or (at_low := self._over(method, low * _UNIT)) > 1:
            return 0
        turn = 0
        while high - low > 1:
            turn += 1
            share = (1 - at_low) / (at_high - at_low) if turn % 3 else 0.5
            middle = min(max(low + 1, low + int(share * (high - low))), high - 1)
            if (over := self._over(method, middle * _UNIT)) <= 1:
                low, at_low = middle, over
            else:
                high, at_high = middle, over
        return low * _UNIT

    def _over(self, method: str, length: int) -> float:
        """Return the largest share that a method needs of any limit."""
        return largest_share(self._limits(self._needs(method, length)[0]))

    def _step(self, method: str, needs: Needs, length: int, hits: float) -> tuple[float, Basis] | None:
        gpu, config = self.machine.gpu, self.model.config.get_text_config(decoder=True)
        if gpu is None:
            return None
        heads = kv_heads(config)
        share = (length + self.new_tokens) / needs.capacity  # of dense layers' KV that there is
        step = step_seconds(
            gpu,
            method,
            layers=config.num_hidden_layers,
            searching=needs.searching,
            batch=self.batch,
            keys=self.batch * length * heads,
            read=self._read + round(needs.dense * share) + needs.windows,
            fetched=round((1 - hits) * needs.fetched),
        )
        return step if step is None or self._read == self.weights else (step[0], "estimated")  # no experts were measured
