"""Perplexity by position, over a text that is sent through every method: what `kvthaw eval perplexity` runs.

As in ClusterKV's figure 10: prompts of growing length from one book, each brought into the cache at once; what then follows in the
book is sent token by token (teacher-forced), so that every prediction that counts was made under the method's budget.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvthaw.engine.decode import decode
from kvthaw.engine.hf import PreTrainedModel
from kvthaw.engine.hf.kv_dir import KvDir
from kvthaw.engine.hf.model import check_prompt
from kvthaw.errors import ConfigError, at_least
from kvthaw.evaluate.job import Progress, Shard, Watch, part
from kvthaw.evaluate.machine import identity, now, versions
from kvthaw.evaluate.passages import opening, text_name, tokens_of
from kvthaw.evaluate.prefills import Prefilled, Prefills, Tell
from kvthaw.evaluate.results import BYTES, Record, ResultsFile, Setting, asked_budget, lacking, largest, means, shared
from kvthaw.evaluate.row_stats import PerRequestStats
from kvthaw.evaluate.rows import Rows, alone, spread
from kvthaw.evaluate.variant import FULL, Variant, complete, setting_of


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
    def seeds(self) -> range:
        """Of its samples."""
        return range(self.seed, self.seed + self.samples)

    @property
    def tokens(self) -> int:
        """How many tokens of a text a sample takes."""
        return max(self.lengths) + self.steps + 1


def summarize(records: Sequence[Record], full: Sequence[Record]) -> dict[str, Any]:
    """Pool the records of a variant at one length beside full attention's on the same samples, in the same order, if there are any.

    nll: the mean in nats a token; perplexity: its exponential; difference: to full attention's nll on the same tokens,
    difference_95 its normal interval over all of them.
    """
    own = [value for record in records for value in record["nll"]]
    nll = sum(own) / len(own)
    return {
        **shared(records, "method", "retrieved", "dense_layers", "length", "steps"),
        "budget": asked_budget(records[0]),
        "n": len(records),
        "nll": nll,
        "perplexity": math.exp(nll),
        **_apart(own, [value for record in full for value in record["nll"]]),
        **means(records, "attended_mean"),
        **largest(records, "attended_max", *BYTES),
        "seconds": sum(record["seconds"] for record in records),
        "seed": min(record["seed"] for record in records),
        **shared(records, "text", "model", "weights", "dtype", "device", "versions"),
    }


def _apart(own: list[float], theirs: list[float]) -> dict[str, Any]:
    if not theirs:
        return dict.fromkeys(("full_nll", "full_perplexity", "difference", "difference_95"))
    apart = [a - b for a, b in zip(own, theirs, strict=True)]
    full_nll, change = (sum(values) / len(values) for values in (theirs, apart))
    spread = 1.96 * math.sqrt(sum((value - change) ** 2 for value in apart) / max(1, len(apart) - 1) / len(apart))
    found = {"full_nll": full_nll, "full_perplexity": math.exp(full_nll), "difference": change}
    return {**found, "difference_95": (change - spread, change + spread)}


@dataclass(frozen=True, slots=True)
class Stretch:
    """Samples of a course at its one length that share their steps, by their seeds, and what is to be computed of each."""

    course: Course
    seeds: tuple[int, ...]
    variants: tuple[Variant, ...]


class Reader:
    """A model, and what it has read so far. batch, full, kv_dir: as for Runner."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        known: ResultsFile | None = None,
        *,
        name: str = "model",
        batch: int | None = None,
        full: bool = True,
        kv_dir: KvDir | None = None,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.known = ResultsFile() if known is None else known
        self._same = identity(model, name)
        self._rows, self.prefills = Rows(model, batch if full else alone(batch)), Prefills(model, full, kv_dir)
        self._bodies: dict[str | None, list[int]] = {}  # the tokens of texts, which every setting asks for

    def run(
        self,
        course: Course,
        variants: Sequence[Variant],
        progress: Watch = lambda _: None,
        *,
        shard: Shard = (1, 1),
    ) -> dict[Variant, list[dict[str, Any]]]:
        """Return the summaries of every variant, and of FULL, by length. Only what is not known is computed. shard: (i, n) takes
        every n-th place in the text, from the i-th on.

        Raises ConfigError, before any work, for a setting that no cache would take and for a text or a model that is too short.
        """
        every_one = dict.fromkeys((*variants, FULL) if self.prefills.full else variants)
        wanted = {asked: complete(self.model, asked) for asked in every_one}
        check_prompt(self.model, course.tokens - 1)
        lengths = sorted(set(course.lengths))
        seeds, every = part(course.seeds, shard), list(dict.fromkeys(wanted.values()))
        for seed in seeds:
            self._place(course, seed)  # a text that is too short is refused now
        stretches = self.missing(course, every, seeds)
        total = len(seeds) * len(lengths) * len(every)
        done = total - sum(len(stretch.seeds) * len(stretch.variants) for stretch in stretches)

        def show(tokens: int, of: int, doing: str) -> None:
            progress(Progress(done, total, tokens, of, doing))

        for stretch in stretches:
            for found in self.compute(stretch, show):
                self.known.add(*found)
                done += len(found)
        show(0, 0, "done")

        def records(variant: Variant, length: int) -> list[Record]:
            found = [self.known.get(self._setting(course, variant, length, seed)) for seed in seeds]
            return [record for record in found if record is not None]

        return {
            asked: [summarize(records(variant, length), records(FULL, length)) for length in lengths if seeds]
            for asked, variant in wanted.items()
        }

    def missing(self, course: Course, wanted: Sequence[Variant], seeds: Sequence[int] | None = None) -> list[Stretch]:
        """Return what is not known of a course, or of some of its seeds, under complete variants: at each length the samples that
        lack the same, as many at once as share their steps, each read from a place of its own.

        Raises ConfigError for a text or a model that is too short.
        """
        found, places = [], course.seeds if seeds is None else seeds
        for length in sorted(set(course.lengths)):
            one = replace(course, lengths=(length,))
            check_prompt(self.model, one.tokens - 1)
            settings = {variant: [self._setting(one, variant, length, seed) for seed in places] for variant in wanted}
            for lack, some in lacking(self.known, settings, places).items():
                spans = spread(len(some), self._rows.at(one.tokens))
                found += [Stretch(one, tuple(some[a:b]), lack) for a, b in spans]
        return found

    def compute(self, stretch: Stretch, tell: Tell = lambda *_: None) -> Iterator[list[Record]]:
        """Yield the records of one variant at once."""
        course, (length,) = stretch.course, stretch.course.lengths
        texts = [self._place(course, seed)[1] for seed in stretch.seeds]
        for prefilled in self.prefills.of(stretch.variants, [ids[:length] for ids in texts], tell):
            settings = [self._setting(course, prefilled.variant, length, seed) for seed in stretch.seeds]
            yield self._read(settings, prefilled, [ids[length:] for ids in texts], tell)

    def _setting(self, course: Course, variant: Variant, length: int, seed: int) -> Setting:
        """Return what a record of one sample after `length` tokens depends on. start: the token of the text where it begins."""
        of = {"steps": course.steps, "text": text_name(course.text), "length": length, "seed": seed}
        return {**self._same, **setting_of(variant), **of, "start": self._place(course, seed)[0]}

    def _place(self, course: Course, seed: int) -> tuple[int, list[int]]:
        """Return where in the text a sample begins, and its tokens. Raises ConfigError for a text that is too short: one that began
        anew would be predicted from its first reading."""
        if course.text not in self._bodies:
            self._bodies[course.text] = tokens_of(self.tokenizer, course.text)
        first, body = opening(self.tokenizer), self._bodies[course.text]
        needed = max(0, course.tokens - len(first))
        if needed > len(body):
            most = f"length and steps take {course.tokens:,} tokens"
            raise ConfigError(f"the text has {len(body):,} tokens; {most}: take fewer, or a longer text")
        start = random.Random(seed).randint(0, len(body) - needed) if seed else 0
        return start, [*first, *body[start : start + needed]][: course.tokens]

    def _read(
        self,
        settings: list[Setting],
        prompts: Prefilled,
        texts: list[list[int]],
        show: Tell,
    ) -> list[Record]:
        """Send each row's text but its last token through a fork, one by one, and score all tokens but the first."""
        doing, steps = str(prompts.variant), settings[0]["steps"]
        show(0, steps, doing)
        start = now(self.model.device)
        cache = prompts.make()
        counts, nll = PerRequestStats(cache), list[Tensor]()
        tokens = torch.tensor(texts, device=self.model.device)[:, : steps + 1]
        sent = 0

        def score(logits: Tensor) -> Tensor | None:
            nonlocal sent
            if sent:
                scores = torch.log_softmax(logits.float(), dim=-1)
                nll.append(-scores.gather(1, tokens[:, sent : sent + 1])[:, 0])
            sent += 1
            return tokens[:, sent - 1] if sent <= steps else None

        for _ in decode(self.model, cache, torch.empty(0), score):
            show(sent, steps, doing)
        stats = counts.rows([steps] * len(texts))
        counts.detach()
        cache.layers.clear()  # its rows go before the next one's come
        seconds = (now(self.model.device) - start) / len(texts)
        return [
            Record(
                setting,
                {
                    "nll": [round(value, 6) for value in values],
                    **{name: value for name, value in row.measures().items() if name in _MEASURES},
                    "seconds": seconds,
                    "versions": versions(),
                },
            )
            for setting, row, values in zip(settings, stats, torch.stack(nll, dim=1).tolist(), strict=True)
        ]


_MEASURES = ("held_budget", "attended_mean", "attended_max", *BYTES)
