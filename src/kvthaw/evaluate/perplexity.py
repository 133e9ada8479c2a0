"""Perplexity by position, over a text that is sent through every method: what `kvthaw eval perplexity` runs.

As in ClusterKV's figure 10: prompts of growing length from one book, each brought into the cache at once; what then follows in the
book is sent token by token (teacher-forced), so that every prediction that counts was made under the method's budget.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from kvthaw.engine.hf import Cache
from kvthaw.errors import ConfigError
from kvthaw.evaluate.decode import check_prompt, forward, prefill
from kvthaw.evaluate.job import Progress
from kvthaw.evaluate.machine import identity, now, versions
from kvthaw.evaluate.metrics import mean
from kvthaw.evaluate.passages import opening, text_name, tokens_of
from kvthaw.evaluate.results import AsLine, Kept, OfModel
from kvthaw.evaluate.variant import FULL, Variant, complete

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Course:
    """Where in a text is measured.

    lengths: tokens before a stretch, the opening ones included. steps: predictions of a stretch. samples: places in the text from
    which it is read: its beginning for seed 0, drawn by the seed for others. text: None is the book that ships.
    """

    lengths: tuple[int, ...]
    steps: int = 64
    samples: int = 1
    seed: int = 0
    text: str | None = None

    def __post_init__(self) -> None:
        if not self.lengths:
            raise ConfigError("lengths are empty; name the tokens before a stretch, such as 1024,4096")
        for name, least in (("steps", 1), ("samples", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        for length in self.lengths:
            if length < 1:
                raise ConfigError(f"a length is {length}; it must be at least 1")

    @property
    def tokens(self) -> int:
        """How many tokens of a text a sample takes."""
        return max(self.lengths) + self.steps + 1


@dataclass(frozen=True, slots=True)
class Setting(OfModel):
    """All that a line depends on; two lines of one setting are the same line. text: the hash of the text, "book" for what ships;
    start: the token of it at which the sample begins."""

    text: str
    start: int
    length: int
    steps: int
    seed: int
    method: str
    budget: int | float | None
    retrieved: int | None
    dense_layers: int


@dataclass(frozen=True, slots=True)
class Line(AsLine):
    """One stretch under one variant. nll: of each token, in nats. Bytes and attended as in `kvthaw.Stats`; seconds: for indexing
    and steps."""

    setting: Setting
    nll: tuple[float, ...]
    held_budget: int | None
    attended_mean: float | None
    attended_max: int | None
    kv_device_bytes: int
    kv_dense_bytes: int
    kv_host_bytes: int
    seconds: float
    versions: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def from_json(text: str) -> Line:
        """The reverse. Raises ValueError, KeyError or TypeError for anything else."""
        data = json.loads(text)
        data["setting"] = Setting(**data["setting"])
        data["nll"] = tuple(data["nll"])
        return Line(**data)


@dataclass(frozen=True, slots=True)
class Summary:
    """The stretches of one variant after so many tokens. nll: the mean in nats a token; perplexity: its exponential; difference: to
    full attention's nll on the same tokens, difference_95 its normal interval over all of them."""

    method: str
    budget: int | float | None
    retrieved: int | None
    dense_layers: int
    length: int
    steps: int
    n: int
    nll: float
    perplexity: float
    full_nll: float
    full_perplexity: float
    difference: float
    difference_95: tuple[float, float]
    attended_mean: float | None
    attended_max: int | None
    kv_device_bytes: int
    kv_dense_bytes: int
    kv_host_bytes: int
    seconds: float
    text: str
    seed: int
    model: str
    weights: str
    dtype: str
    device: str
    versions: dict[str, str]

    @staticmethod
    def of(lines: Sequence[Line], full: Sequence[Line]) -> Summary:
        """Pool the lines of a variant at one length beside full attention's on the same samples, in the same order."""
        first, of = lines[0], lines[0].setting
        own = [value for line in lines for value in line.nll]
        theirs = [value for line in full for value in line.nll]
        apart = [a - b for a, b in zip(own, theirs, strict=True)]
        nll, full_nll, change = (sum(values) / len(values) for values in (own, theirs, apart))
        spread = math.sqrt(sum((value - change) ** 2 for value in apart) / max(1, len(apart) - 1) / len(apart))
        most = [line.attended_max for line in lines if line.attended_max is not None]
        return Summary(
            method=of.method,
            budget=of.budget if of.budget is not None else first.held_budget,
            retrieved=of.retrieved,
            dense_layers=of.dense_layers,
            length=of.length,
            steps=of.steps,
            n=len(lines),
            nll=nll,
            perplexity=math.exp(nll),
            full_nll=full_nll,
            full_perplexity=math.exp(full_nll),
            difference=change,
            difference_95=(change - 1.96 * spread, change + 1.96 * spread),
            attended_mean=mean(line.attended_mean for line in lines),
            attended_max=max(most) if most else None,
            kv_device_bytes=max(line.kv_device_bytes for line in lines),
            kv_dense_bytes=max(line.kv_dense_bytes for line in lines),
            kv_host_bytes=max(line.kv_host_bytes for line in lines),
            seconds=sum(line.seconds for line in lines),
            text=of.text,
            seed=min(line.setting.seed for line in lines),
            model=of.model,
            weights=of.weights,
            dtype=of.dtype,
            device=of.device,
            versions=first.versions,
        )

    def to_dict(self) -> dict[str, Any]:
        """A plain dict, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Stretch:
    """One sample at one length, and what is to be computed of it."""

    course: Course
    variants: tuple[Variant, ...]

    @property
    def lines(self) -> int:
        """How many lines it gives."""
        return len(self.variants)

    @property
    def name(self) -> str:
        """What it is, in words."""
        return f"perplexity {self.course.lengths[0]:,}"


class Reader:
    """A model, and what it has read so far."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, known: Kept[Line] | None = None, *, name: str = "model") -> None:
        self.model, self.tokenizer = model, tokenizer
        self.known: Kept[Line] = Kept(None, Line.from_json) if known is None else known
        self._same = identity(model, name)

    def run(
        self, course: Course, variants: Sequence[Variant], progress: Callable[[Progress], None] | None = None
    ) -> dict[Variant, list[Summary]]:
        """The summaries of every variant, and of FULL, by length. One prefill a sample, which grows from length to length, serves
        all; only what is not known is computed.

        Raises ConfigError, before any work, for a setting that no cache would take and for a text or a model that is too short.
        """
        wanted = {asked: complete(self.model, asked) for asked in dict.fromkeys((*variants, FULL))}
        check_prompt(self.model, course.tokens - 1)
        lengths = sorted(set(course.lengths))
        texts = [self._place(course, course.seed + i) for i in range(course.samples)]
        shared = {"steps": course.steps, "text": text_name(course.text), **self._same}

        def setting(variant: Variant, length: int, i: int) -> Setting:
            return Setting(length=length, seed=course.seed + i, start=texts[i][0], **_chosen(variant), **shared)  # type: ignore[arg-type]

        every = list(dict.fromkeys(wanted.values()))
        total, done = course.samples * len(lengths) * len(every), 0

        def show(tokens: int, of: int, doing: str) -> None:
            if progress is not None:
                progress(Progress(done, total, tokens, of, doing))

        for i, (_, ids) in enumerate(texts):
            settings = {length: {variant: setting(variant, length, i) for variant in every} for length in lengths}
            missing = {
                length: {variant: one for variant, one in found.items() if self.known.get(one) is None}
                for length, found in settings.items()
            }
            done += len(lengths) * len(every) - sum(map(len, missing.values()))
            for line in self._lines(ids, course.steps, missing, show):
                self.known.add(line)
                done += 1
        show(0, 0, "done")

        def lines(variant: Variant, length: int) -> list[Line]:
            found = [self.known.get(setting(variant, length, i)) for i in range(course.samples)]
            return [line for line in found if line is not None]

        return {
            asked: [Summary.of(lines(variant, length), lines(FULL, length)) for length in lengths]
            for asked, variant in wanted.items()
        }

    def missing(self, course: Course, wanted: Sequence[Variant], get: Callable[[Setting], Line | None]) -> list[Stretch]:
        """What is not known of a course under complete variants, a stretch a sample and length, each read from a place of its own.

        Raises ConfigError for a text or a model that is too short.
        """
        found = []
        for i, length in itertools.product(range(course.samples), sorted(set(course.lengths))):
            one = replace(course, lengths=(length,), samples=1, seed=course.seed + i)
            check_prompt(self.model, one.tokens - 1)
            settings = self._settings(one, wanted)
            lack = tuple(variant for variant, setting in settings.items() if get(setting) is None)
            if lack:
                found.append(Stretch(one, lack))
        return found

    def compute(self, stretch: Stretch, tell: Callable[[int, int, str], None] = lambda *_: None) -> Iterator[list[Line]]:
        """The line of each variant of a stretch."""
        settings = self._settings(stretch.course, stretch.variants)
        _, ids = self._place(stretch.course, stretch.course.seed)
        for line in self._lines(ids, stretch.course.steps, {stretch.course.lengths[0]: settings}, tell):
            yield [line]

    def _settings(self, course: Course, variants: Sequence[Variant]) -> dict[Variant, Setting]:
        """Of the one sample of a course at its one length."""
        start, _ = self._place(course, course.seed)
        shared: dict[str, Any] = {"steps": course.steps, "text": text_name(course.text), **self._same}
        return {
            variant: Setting(length=course.lengths[0], seed=course.seed, start=start, **_chosen(variant), **shared)
            for variant in dict.fromkeys(variants)
        }

    def _place(self, course: Course, seed: int) -> tuple[int, list[int]]:
        """Where in the text a sample begins, and its tokens. Raises ConfigError for a text that is too short: one that began anew
        would be predicted from its first reading."""
        first, body = opening(self.tokenizer), tokens_of(self.tokenizer, course.text)
        needed = max(0, course.tokens - len(first))
        if needed > len(body):
            most = f"length and steps take {course.tokens:,} tokens"
            raise ConfigError(f"the text has {len(body):,} tokens; {most}: take fewer, or a longer text")
        start = random.Random(seed).randint(0, len(body) - needed) if seed else 0
        return start, [*first, *body[start : start + needed]][: course.tokens]

    def _lines(
        self, ids: list[int], steps: int, missing: dict[int, dict[Variant, Setting]], show: Callable[[int, int, str], None]
    ) -> Iterator[Line]:
        """Prefill to each length in turn, then fork for each variant."""
        base, held = Cache(self.model, "full"), 0
        for length, settings in missing.items():
            if not settings:
                continue
            prefill(self.model, base, ids[held:length], progress=lambda done, of: show(done, of, "prefill"))
            held = length
            for variant, setting in settings.items():
                yield self._line(setting, variant, base, ids[length : length + steps + 1], show)
                gc.collect()  # a cache refers to itself; its host rows go before the next one's come

    def _line(
        self, setting: Setting, variant: Variant, base: Cache, ids: list[int], show: Callable[[int, int, str], None]
    ) -> Line:
        """Send all of `ids` but the last through a fork, one by one, and score all but the first."""
        doing = f"{variant.method} {variant.budget or variant.retrieved or ''}".strip()
        show(0, setting.steps, doing)
        start = now(self.model.device)
        limits = {} if variant == FULL else {"budget": variant.budget, "retrieved": variant.retrieved}
        cache = base.fork(variant.method, dense_layers=setting.dense_layers, **limits)
        cache.wait()
        nll: list[Tensor] = []
        for token, target in itertools.pairwise(ids):
            logits = forward(self.model, cache, [token])
            nll.append(-torch.log_softmax(logits.float(), dim=-1)[target])
            show(len(nll), setting.steps, doing)
        stats, dense = cache.stats(), cache.settings.method.dense
        return Line(
            setting=setting,
            nll=tuple(round(value, 6) for value in torch.stack(nll).tolist()),
            held_budget=stats.budget,
            attended_mean=stats.attended_mean,
            attended_max=stats.attended_max,
            kv_device_bytes=stats.kv_dense_bytes if dense else stats.kv_device_bytes,
            kv_dense_bytes=0 if dense else stats.kv_dense_bytes,
            kv_host_bytes=stats.kv_host_bytes,
            seconds=now(self.model.device) - start,
            versions=versions(),
        )


def _chosen(variant: Variant) -> dict[str, Any]:
    chosen = asdict(variant)
    return {**chosen, "dense_layers": variant.dense_layers or 0}
