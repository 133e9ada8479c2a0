"""Time a user's own model on the user's prompt: full attention, transformers' caches and kvthaw's methods, with a
recommendation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvthaw.bench.decode import Bench, Measures
from kvthaw.bench.settings import HF, DecodeSetting, possible, values
from kvthaw.bench.steps import WARM, Steps, replayed, take
from kvthaw.engine.hf import DynamicCache, PreTrainedModel
from kvthaw.engine.hf.model import check_prompt
from kvthaw.errors import CacheError, HostMemoryError
from kvthaw.evaluate.files import opening, text_name, tokens_of
from kvthaw.evaluate.machine import fingerprint
from kvthaw.evaluate.results import Record, ResultsFile
from kvthaw.formatting import short

EXACT = (*HF, "full")
"""Caches with full attention. The first of them is the reference for the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSetting(DecodeSetting):
    """A setting of a loaded model.

    shape: the model's name.

    weights: fingerprint of the weights.
    text: fingerprint of the text.
    """

    weights: str
    dtype: str
    text: str


@dataclass(frozen=True, slots=True)
class Reading:
    """A model, its name, and a text that provides the prompts and the later tokens. None: the shipped book."""

    model: PreTrainedModel
    tokenizer: Any
    name: str
    text: str | None = None

    def ids(self) -> list[int]:
        """Return all tokens, special ones before them."""
        return [*opening(self.tokenizer), *tokens_of(self.tokenizer, self.text)]

    def grid(
        self, methods: Sequence[str], lengths: Sequence[int], batches: Sequence[int], ways: Sequence[str], **wanted: Any
    ) -> list[OwnSetting]:
        """Return the settings: transformers' caches and full attention, then the methods, each by the last of the ways to take
        steps that it can. Raises ConfigError for what cannot be."""
        model = self.model
        of_model = {"shape": self.name, "weights": fingerprint(model), "dtype": str(model.dtype).removeprefix("torch.")}
        wanted = {**wanted, **of_model, "text": text_name(self.text)}
        cuda, found = model.device.type == "cuda", list[OwnSetting]()
        for length, batch in itertools.product(lengths, batches):
            check_prompt(model, length + 1 + WARM + wanted["new_tokens"])
            for method in dict.fromkeys((HF[0], "full", *HF[1:] * cuda, *methods)):
                fields = values(method, length=length, batch=batch, **wanted)
                each = [OwnSetting(steps=way, **fields) for way in ways]
                found.append(next((one for one in reversed(each) if possible(one, cuda)), each[0]))
        return found


class OwnBench(Bench[OwnSetting]):
    """A Bench of one model. Every cache gets the same prompt and the same later tokens, from a text.

    All exact caches must choose the same tokens, except for a tenth that rounding may change.

    unfit: methods that did not fit in memory.
    """

    warm = WARM

    def __init__(self, reading: Reading, known: ResultsFile, **how: Any) -> None:
        super().__init__(known, **how)
        self.model, self.attends = reading.model, reading.model.config._attn_implementation
        self.unfit: list[OwnSetting] = []
        self._ids = reading.ids()

    def failed(self, one: OwnSetting, error: Exception) -> None:
        if isinstance(error, (torch.OutOfMemoryError, HostMemoryError)):
            self.unfit.append(one)
            self.note(f"does not fit: {one}")
        else:
            super().failed(one, error)

    def tokens(self, one: OwnSetting) -> Iterator[Tensor]:
        for at in itertools.count(one.length):
            yield torch.full((one.batch, 1), self._ids[at % len(self._ids)], device=self.device)

    def prompt(self, one: OwnSetting) -> Tensor:
        row = list(itertools.islice(itertools.cycle(self._ids), one.length))
        return torch.tensor([row] * one.batch, device=self.device)

    def heat(self, one: OwnSetting, cache: DynamicCache, tokens: Iterator[Tensor]) -> None:
        """Run steps as the timed ones, so that all kernels are compiled."""
        replayed(self.model, cache, one.steps)
        take(self.model, cache, tokens, 1, capture=one.steps != "eager")

    def taken(self, one: OwnSetting, cache: DynamicCache, taken: Steps) -> Measures:
        """Return a Bench's measures and two more.

        chosen: the likeliest tokens [B][n] of the steps.
        agreement: the share of them that the first known cache of EXACT chose too.
        """
        chosen = torch.stack(taken.chosen, dim=1).tolist()
        same, agreement = self._exact(one), 1.0
        if same is not None:
            pairs = [pair for rows in zip(chosen, same, strict=True) for pair in zip(*rows, strict=True)]
            agreement = sum(ours == theirs for ours, theirs in pairs) / len(pairs)
            if one.method in EXACT and len(pairs) * (1 - agreement) > max(1, len(pairs) / 10):
                raise CacheError(
                    f"{one.method} chose {agreement:.0%} of the tokens that another exact cache chose; all should be the same"
                )
        known = {"agreement": agreement if same is not None or one.method in EXACT else None}
        return {**super().taken(one, cache, taken), **known, "chosen": chosen}

    def _exact(self, one: OwnSetting) -> list[list[int]] | None:
        """Return the tokens that an exact cache chose at the steps of a setting; None if unknown."""
        mine = {name: value for name, value in one.to_dict().items() if name in _SAME}
        found = {record["method"]: record["chosen"] for record in self.known if mine.items() <= record.setting.items()}
        return next((found[name] for name in EXACT if name in found), None)


_SAME = ("shape", "weights", "dtype", "text", "length", "batch", "new_tokens", "device")


FASTER, ALIKE = 0.95, 0.9
"""Shares of full attention's time below which a method is worth its approximation, and of its tokens that it should choose."""


def advice(records: Sequence[Record]) -> str:
    """Return a sentence on the records of a Bench of one's own model at one length and batch."""
    first = records[0]
    at = f"At {short(first['length'])} tokens" + (f" x {first['batch']}" if first["batch"] > 1 else "")
    at = f"{at} on {'this CPU' if first['device'] == 'cpu' else first['device']}"
    exact = [one for one in records if one["method"] in EXACT]
    others = sorted((one for one in records if one not in exact), key=_time)
    held = [one for one in exact if one["method"] != "hf-offloaded"]
    if not held:
        fits_not = f"{at} full attention does not fit"
        if not others or (exact and _time(exact[0]) <= _time(others[0])):
            return f"{fits_not}; transformers' offloaded cache takes {_ms(exact[0])}: use it."
        beside = f", transformers' offloaded cache {_ms(exact[0])}" if exact else ""
        return f"{fits_not}; {_named(others[0])}{beside}: {_use(others[0])}."
    full, best = min(held, key=_time), others[0] if others else None
    fits = f"{at} full attention fits and takes {_ms(full)}"
    if best is not None and _time(best) < FASTER * _time(full):
        alike = next((one for one in others if one["agreement"] >= ALIKE and _time(one) < FASTER * _time(full)), None)
        if alike is None:
            return f"{fits}; {_named(best)}: keep full attention, or raise the budget."
        return f"{fits}; {_named(alike)}: {_use(alike)} if kvthaw eval agreement confirms acceptable accuracy on your text."
    ours = full["method"] == "full" and _time(full) < FASTER * max(map(_time, held))
    through = ' through kvthaw.attach(model, "full")' if ours else ""
    best_of = "fastest" if best is None or _time(full) <= _time(best) else "as fast as any"
    less = "" if best is None else f"; {_named(best)} and holds {best['share_with_dense']:.0%} of its KV on the device"
    return f"{at} full attention fits and is {best_of}{through}, {_ms(full)}: keep it{less}."


def _named(one: Record) -> str:
    limit = "" if one["budget"] is None else f" at a budget of {one['budget']:,}"
    alike = "" if one["agreement"] is None else f", picks the same token in {one['agreement']:.0%} of steps"
    return f"{one['method']}{limit} takes {_ms(one)}{alike}"


def _use(one: Record) -> str:
    asked = one.setting
    limits = "".join(f", {name}={asked[name]}" for name in ("budget", "retrieved") if asked[name] is not None)
    return f'use kvthaw.attach(model, "{asked["method"]}"{limits})'


def _time(one: Record) -> float:
    return float(one["tpot_s"])


def _ms(one: Record) -> str:
    return f"{1e3 * _time(one):.3g} ms a token"
