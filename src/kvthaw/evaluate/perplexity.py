"""Perplexity by position, over a text that is sent through every method: what `kvthaw eval perplexity` runs.

As in ClusterKV's figure 10: prompts of growing length from one book, each brought into the cache at once; what then follows in the
book is sent token by token (teacher-forced), so that every prediction that counts was made under the method's budget.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kvthaw.engine.hf import Cache
from kvthaw.errors import ConfigError, at_least
from kvthaw.evaluate.decode import check_prompt, forward_rows, prefill
from kvthaw.evaluate.job import Progress
from kvthaw.evaluate.machine import identity, now, versions
from kvthaw.evaluate.metrics import mean
from kvthaw.evaluate.passages import opening, text_name, tokens_of
from kvthaw.evaluate.results import AsLine, Kept, OfVariant
from kvthaw.evaluate.rows import Forks, Rows, joined, spread
from kvthaw.evaluate.tally import Tally
from kvthaw.evaluate.variant import FULL, Variant, complete, fork, setting_of

if TYPE_CHECKING:
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
        at_least(1, steps=self.steps, samples=self.samples)
        at_least(0, seed=self.seed)
        for length in self.lengths:
            if length < 1:
                raise ConfigError(f"a length is {length}; it must be at least 1")

    @property
    def tokens(self) -> int:
        """How many tokens of a text a sample takes."""
        return max(self.lengths) + self.steps + 1


@dataclass(frozen=True, slots=True)
class Setting(OfVariant):
    """All that a line depends on; two lines of one setting are the same line. text: the hash of the text, "book" for what ships;
    start: the token of it at which the sample begins."""

    text: str
    start: int
    length: int
    steps: int
    seed: int


@dataclass(frozen=True, slots=True)
class Line(AsLine):
    """One stretch under one variant. nll: of each token, in nats. Bytes and attended as in `kvthaw.Stats`; seconds: for indexing
    and steps, a row's share of what they took together."""

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
    """Samples of a course at its one length that share their steps, by their seeds, and what is to be computed of each."""

    course: Course
    seeds: tuple[int, ...]
    variants: tuple[Variant, ...]

    @property
    def lines(self) -> int:
        """How many lines it gives."""
        return len(self.seeds) * len(self.variants)

    @property
    def name(self) -> str:
        """What it is, in words."""
        return f"perplexity {self.course.lengths[0]:,}, {len(self.seeds)} samples"

    def halves(self) -> list[Stretch]:
        """Two of half as many samples; none of a single one."""
        middle = len(self.seeds) // 2
        return [replace(self, seeds=some) for some in (self.seeds[:middle], self.seeds[middle:])] if middle else []


class Reader:
    """A model, and what it has read so far. batch: samples that share their steps; see Rows. Each is prefilled alone."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        known: Kept[Line] | None = None,
        *,
        name: str = "model",
        batch: int | None = None,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.known: Kept[Line] = Kept(None, Line.from_json) if known is None else known
        self._same = identity(model, name)
        self._rows = Rows(model, batch)
        self._bodies: dict[str | None, list[int]] = {}  # the tokens of texts, which every setting asks for

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
        texts = {seed: self._place(course, seed) for seed in range(course.seed, course.seed + course.samples)}
        setting = partial(self._setting, course)
        every = list(dict.fromkeys(wanted.values()))
        total, done = course.samples * len(lengths) * len(every), 0

        def show(tokens: int, of: int, doing: str) -> None:
            if progress is not None:
                progress(Progress(done, total, tokens, of, doing))

        lacking: dict[tuple[tuple[Variant, ...], ...], list[int]] = {}
        for seed in texts:
            known = ([self.known.get(setting(variant, length, seed)) for variant in every] for length in lengths)
            lack = tuple(tuple(v for v, line in zip(every, row, strict=True) if line is None) for row in known)
            lacking.setdefault(lack, []).append(seed)
        done = total - sum(len(seeds) * sum(map(len, lack)) for lack, seeds in lacking.items())
        for lack, seeds in lacking.items():
            for a, b in spread(len(seeds), self._rows.at(course.tokens)):
                some = seeds[a:b]
                missing = {
                    length: {variant: [setting(variant, length, seed) for seed in some] for variant in of}
                    for length, of in zip(lengths, lack, strict=True)
                    if of
                }
                for found in self._lines([texts[seed][1] for seed in some], course.steps, missing, show):
                    self.known.extend(found)
                    done += len(found)
        show(0, 0, "done")

        def lines(variant: Variant, length: int) -> list[Line]:
            found = [self.known.get(setting(variant, length, seed)) for seed in texts]
            return [line for line in found if line is not None]

        return {
            asked: [Summary.of(lines(variant, length), lines(FULL, length)) for length in lengths]
            for asked, variant in wanted.items()
        }

    def missing(self, course: Course, wanted: Sequence[Variant], get: Callable[[Setting], Line | None]) -> list[Stretch]:
        """What is not known of a course under complete variants: at each length the samples that lack the same, as many at once as
        share their steps, each read from a place of its own.

        Raises ConfigError for a text or a model that is too short.
        """
        found = []
        for length in sorted(set(course.lengths)):
            one, lacking = replace(course, lengths=(length,)), dict[tuple[Variant, ...], list[int]]()
            check_prompt(self.model, one.tokens - 1)
            for seed in range(course.seed, course.seed + course.samples):
                of = {variant: self._setting(one, variant, length, seed) for variant in wanted}
                lack = tuple(variant for variant, setting in of.items() if get(setting) is None)
                if lack:
                    lacking.setdefault(lack, []).append(seed)
            for lack, seeds in lacking.items():
                spans = spread(len(seeds), self._rows.at(one.tokens))
                found += [Stretch(one, tuple(seeds[a:b]), lack) for a, b in spans]
        return found

    def compute(self, stretch: Stretch, tell: Callable[[int, int, str], None] = lambda *_: None) -> Iterator[list[Line]]:
        """The lines of a stretch, those of one variant at once."""
        course, (length,) = stretch.course, stretch.course.lengths
        of = {variant: [self._setting(course, variant, length, seed) for seed in stretch.seeds] for variant in stretch.variants}
        texts = [self._place(course, seed)[1] for seed in stretch.seeds]
        return self._lines(texts, course.steps, {length: of}, tell)

    def _setting(self, course: Course, variant: Variant, length: int, seed: int) -> Setting:
        """Of one sample of a course after `length` tokens."""
        shared = {"steps": course.steps, "text": text_name(course.text), **setting_of(variant), **self._same}
        return Setting(length=length, seed=seed, start=self._place(course, seed)[0], **shared)

    def _place(self, course: Course, seed: int) -> tuple[int, list[int]]:
        """Where in the text a sample begins, and its tokens. Raises ConfigError for a text that is too short: one that began anew
        would be predicted from its first reading."""
        if course.text not in self._bodies:
            self._bodies[course.text] = tokens_of(self.tokenizer, course.text)
        first, body = opening(self.tokenizer), self._bodies[course.text]
        needed = max(0, course.tokens - len(first))
        if needed > len(body):
            most = f"length and steps take {course.tokens:,} tokens"
            raise ConfigError(f"the text has {len(body):,} tokens; {most}: take fewer, or a longer text")
        start = random.Random(seed).randint(0, len(body) - needed) if seed else 0
        return start, [*first, *body[start : start + needed]][: course.tokens]

    def _lines(
        self,
        texts: list[list[int]],
        steps: int,
        missing: dict[int, dict[Variant, list[Setting]]],
        show: Callable[[int, int, str], None],
    ) -> Iterator[list[Line]]:
        """Prefill each text to each length in turn, then fork all of them for each variant; settings: one a text."""
        bases, held = [Cache(self.model, "full") for _ in texts], 0
        for length, variants in missing.items():
            total = len(texts) * (length - held)
            for row, (base, ids) in enumerate(zip(bases, texts, strict=True)):
                before = row * (length - held)
                prefill(
                    self.model,
                    base,
                    ids[held:length],
                    progress=lambda done, _, before=before, total=total: show(before + done, total, "prefill"),  # type: ignore[misc]
                )
            held, last = length, length == max(missing)
            together = joined(self.model, bases if last else [base.fork("full") for base in bases])
            with Forks(together) as forks:
                for variant, settings in variants.items():
                    make = forks.fork if len(texts) > 1 else partial(fork, together)  # a single one is timed
                    yield self._read(
                        settings, variant, partial(make, variant), [ids[length : length + steps + 1] for ids in texts], show
                    )

    def _read(
        self,
        settings: list[Setting],
        variant: Variant,
        make: Callable[[], Cache],
        texts: list[list[int]],
        show: Callable[[int, int, str], None],
    ) -> list[Line]:
        """Send all of each row's text but its last token through the fork that `make` makes, one by one, and score all but the
        first."""
        doing, steps = f"{variant.method} {variant.budget or variant.retrieved or ''}".strip(), settings[0].steps
        show(0, steps, doing)
        start = now(self.model.device)
        cache = make()
        tally, nll = Tally(cache), []
        tokens = torch.tensor(texts, device=self.model.device)
        for step in range(steps):
            logits = forward_rows(self.model, cache, [[ids[step]] for ids in texts])
            scores = torch.log_softmax(logits.float(), dim=-1)
            nll.append(-scores.gather(1, tokens[:, step + 1 : step + 2])[:, 0])
            show(step + 1, steps, doing)
        stats, dense = tally.rows([steps] * len(texts)), cache.settings.method.dense
        tally.detach()
        cache.layers.clear()  # a cache refers to itself; its rows go before the next one's come
        seconds = (now(self.model.device) - start) / len(texts)
        return [
            Line(
                setting=setting,
                nll=tuple(round(value, 6) for value in values),
                held_budget=row.budget,
                attended_mean=row.attended_mean,
                attended_max=row.attended_max,
                kv_device_bytes=row.kv_dense_bytes if dense else row.kv_device_bytes,
                kv_dense_bytes=0 if dense else row.kv_dense_bytes,
                kv_host_bytes=row.kv_host_bytes,
                seconds=seconds,
                versions=versions(),
            )
            for setting, row, values in zip(settings, stats, torch.stack(nll, dim=1).tolist(), strict=True)
        ]
