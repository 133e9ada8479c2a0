"""Runs a task under many methods and budgets: one prefill a sample serves them all, and samples share their steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvthaw.engine.hf import PreTrainedModel
from kvthaw.engine.hf.kv_dir import KvDir
from kvthaw.engine.hf.model import check_prompt
from kvthaw.errors import ConfigError
from kvthaw.evaluate.answers import Answers
from kvthaw.evaluate.job import Job, Progress, SampleKey, Shard, Unit, Watch, part
from kvthaw.evaluate.machine import identity, now, versions
from kvthaw.evaluate.prefills import Prefilled, Prefills, Tell
from kvthaw.evaluate.probe import QUALITY, Probe
from kvthaw.evaluate.results import Record, ResultsFile, Setting, lacking
from kvthaw.evaluate.row_stats import PerRequestStats
from kvthaw.evaluate.rows import Rows, alone, spread
from kvthaw.evaluate.tasks import Sample, Task, find
from kvthaw.evaluate.tasks.base import fingerprint_of
from kvthaw.evaluate.text import split_prompt, spoken
from kvthaw.evaluate.variant import FULL, Variant, complete, setting_of


class Runner:
    """A model, and the results it has given so far.

    batch: samples that share their decoding steps, as rows of one cache; see Rows. Each sample is prefilled alone, and a row's line
    is that of the row alone. full: see Prefills; without it full attention is no measure, and samples are run one by one.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        results: ResultsFile | None = None,
        *,
        name: str = "model",
        batch: int | None = 1,
        full: bool = True,
        kv_dir: KvDir | None = None,
    ) -> None:
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.results = ResultsFile() if results is None else results
        self._same = identity(model, name)
        self._rows, self.prefills = Rows(model, batch if full else alone(batch)), Prefills(model, full, kv_dir)

    def run(
        self,
        job: Job,
        variants: Sequence[Variant],
        progress: Watch = lambda _: None,
        *,
        shard: Shard = (1, 1),
    ) -> dict[Variant, list[Record]]:
        """Return the records of every variant, and of FULL, in the order of job.cells(). Only what the results do not hold is
        computed. shard: (i, n) takes every n-th sample, from the i-th on.

        Raises ConfigError, before any work, for a setting that no cache would take.
        """
        if job.chat is not None:
            job.chat.check(self.tokenizer)
        asked_for = (*variants, FULL) if self.prefills.full else tuple(variants)
        wanted = [complete(self.model, variant) for variant in asked_for]
        mine = part(job.cells(), shard)
        units = self.missing(job, wanted, mine)
        done = len(mine) - sum(len(unit.places) for unit in units)
        for unit in units:

            def tell(tokens: int, total: int, doing: str, done: int = done) -> None:
                progress(Progress(done, len(mine), tokens, total, doing))

            for records in self.compute(unit, tell):
                self.results.add(*records)
            done += len(unit.places)
        progress(Progress(len(mine), len(mine), 0, 0, "done"))
        found: dict[Variant, list[Record]] = {}
        for asked, variant in zip(asked_for, wanted, strict=True):
            known = [self.results.get(setting) for setting in self.settings(job, variant, mine)]
            found[asked] = [record for record in known if record is not None]
        return found

    def blocks(self, job: Job) -> list[tuple[SampleKey, ...]]:
        """Return a job's samples, as many at once as share their steps."""
        places = job.cells()
        return [tuple(places[a:b]) for a, b in spread(len(places), self._rows.at(job.length))]

    def missing(self, job: Job, wanted: Sequence[Variant], places: Sequence[SampleKey] | None = None) -> list[Unit]:
        """Return what the results do not hold of a job, or of some of its samples, under complete variants: samples that lack the
        same, as many at once as share their steps."""
        check_prompt(self.model, job.length)  # before it is made
        places, units = job.cells() if places is None else places, []
        settings = {variant: self.settings(job, variant, places) for variant in wanted}
        for lack, some in lacking(self.results, settings, places).items():
            fraction = any(isinstance(one, float) for variant in lack for one in (variant.budget, variant.retrieved))
            spans = spread(len(some), 1 if fraction else self._rows.at(job.length))
            units += [Unit(job, tuple(some[a:b]), lack) for a, b in spans]
        return units

    def settings(self, job: Job, variant: Variant, places: Sequence[SampleKey]) -> list[Setting]:
        """Return what the records of samples under a complete variant depend on.

        depth: where the fact was asked to stand, 0..1, None if left to the task. source: a hash of the haystack and files that were
        given, "" for what ships. chat, system, thinking, max_new_tokens: only where they were given.
        """
        same: Setting = {
            **self._same,
            **setting_of(variant),
            "task": job.task,
            "length": job.length,
            "question": job.question,
            "probe": job.probe,
            "source": fingerprint_of(job.text, job.data),
            **({} if job.chat is None else {"chat": True, **job.chat.setting()}),
            **({} if job.max_new_tokens is None else {"max_new_tokens": job.max_new_tokens}),
        }
        return [{**same, "seed": seed, "depth": depth} for seed, depth in places]

    def compute(self, unit: Unit, tell: Tell = lambda *_: None) -> Iterator[list[Record]]:
        """Yield the records of a unit, those of one variant at once.

        tell(tokens, of, doing) is called as a prefill goes on and before every variant.
        """
        job, task = unit.job, find(unit.job.task, unit.job.data)
        samples = [self._sample(task, job, *place) for place in unit.places]
        parts = [split_prompt(self.tokenizer, sample.context, sample.question, job.chat) for sample in samples]
        for context, question in parts:
            check_prompt(self.model, len(context) + len(question))
        sparse = job.question == "sparse"
        prompts = [context if sparse else context + question for context, question in parts]
        rests = [question if sparse else [] for _, question in parts]
        for filled in self.prefills.of(unit.variants, prompts, tell):
            settings = self.settings(job, filled.variant, unit.places)
            yield self._lines(job, task, samples, filled, rests, settings)

    def _sample(self, task: Task, job: Job, seed: int, depth: float | None) -> Sample:
        try:
            return task.sample(self.tokenizer, length=job.length, seed=seed, depth=depth, text=job.text)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def _lines(
        self,
        job: Job,
        task: Task,
        samples: list[Sample],
        prompts: Prefilled,
        rests: list[list[int]],
        settings: Sequence[Setting],
    ) -> list[Record]:
        """Send the rests of the prompts through their cache, decode, and measure. settings: of one variant, a row each."""
        device, first = self.model.device, settings[0]
        start = now(device)
        cache = prompts.make()
        index_s = now(device) - start
        lengths = [cache.kv.sequences.length(row) for row in range(len(samples))]
        probe = Probe(cache, every=first["probe"], reference=prompts.full) if first["probe"] else None
        counts = PerRequestStats(cache)

        def clock() -> float:
            return now(device) - (0.0 if probe is None else probe.seconds)

        start = clock()
        answers = Answers(self.model, self.tokenizer, cache, until=() if job.thinks else task.stops)
        times = []
        for pieces in answers.stream(prompts.logits, rests, job.limit(task)):
            if any(piece is not None for piece in pieces):
                times.append(clock())
            for row, over in enumerate(answers.over):
                if over:
                    counts.ended(row)
        end = clock()
        stats = counts.rows(answers.steps)
        timing = _Timing.of(prompts, bool(rests[0]), index_s, start, times or [end]) if len(settings) == 1 else _Timing()
        records = []
        for row, (setting, sample, text) in enumerate(zip(settings, samples, answers.texts, strict=True)):
            quality = None if probe is None else probe.row(row, 0, lengths[row] + answers.steps[row])
            measures = {
                "prompt": lengths[row] + len(rests[row]),
                "output": text,
                "answers": list(sample.answers),
                "at": sample.depth,
                "accuracy": task.score(sample, spoken(text, task.stops) if job.thinks else text),
                **stats[row].measures(),
                **{name: None if quality is None else getattr(quality, name) for name in QUALITY},
                "new_tokens": answers.new_tokens[row],
                **asdict(timing),
                "step_s": (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None,
                "rows": len(settings),
                "versions": versions(),
            }
            records.append(Record(setting, measures))
        if probe is not None:
            probe.detach()
        counts.detach()
        cache.layers.clear()  # a cache refers to itself; its rows go before the next one's come
        return records


@dataclass(frozen=True, slots=True)
class _Timing:
    """Seconds of one sample alone; none where rows shared their steps."""

    prefill_s: float | None = None
    index_s: float | None = None
    ttft_s: float | None = None
    tt2t_s: float | None = None
    tpot_s: float | None = None

    @staticmethod
    def of(prompts: Prefilled, sent: bool, index_s: float, start: float, times: list[float]) -> _Timing:
        """sent: whether a part of the prompt was sent after the prefill. times: of the tokens, or of the end without any."""
        prefill_s, several = prompts.seconds[0], len(times) > 1
        return _Timing(
            prefill_s,
            index_s,
            prefill_s + times[0] - start + (index_s if sent else 0.0),
            prefill_s + index_s + times[1] - start if several else None,
            (times[-1] - times[0]) / (len(times) - 1) if several else None,
        )
