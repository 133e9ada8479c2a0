"""Runs a task under many methods and budgets: one prefill a sample serves them all, and samples share their steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kvthaw.engine.chat_template import split_prompt
from kvthaw.engine.hf.model import check_prompt
from kvthaw.errors import ConfigError
from kvthaw.evaluate.evaluator import Evaluator, Piece
from kvthaw.evaluate.machine import now, versions
from kvthaw.evaluate.prefills import Prefilled, Tell
from kvthaw.evaluate.probe import PerRequestStats
from kvthaw.evaluate.results import BYTES, Record, Setting, asked_budget, largest, mean, means, shared
from kvthaw.evaluate.variant import Variant, setting_of
from lab.evaluate.answers import Answers, spoken
from lab.evaluate.job import Job, SampleKey, template_setting
from lab.evaluate.metrics import CHAT, paired, wilson
from lab.evaluate.probe import QUALITY, Probe
from lab.evaluate.tasks import Sample, Task, find
from lab.evaluate.tasks.base import fingerprint_of


class Runner(Evaluator[Job, SampleKey]):
    """Tasks: see Evaluator."""

    def check(self, work: Job) -> None:
        if work.chat is not None:
            work.chat.check(self.tokenizer)
        check_prompt(self.model, work.length)  # before it is made

    def places(self, work: Job) -> list[SampleKey]:
        return work.cells()

    def rows(self, work: Job) -> int:
        return self.sharing.at(work.length)

    def blocks(self, work: Job, places: Sequence[SampleKey], variants: Sequence[Variant] = ()) -> list[tuple[SampleKey, ...]]:
        """Return the samples one by one where a limit is a fraction of their lengths, which may differ."""
        fraction = any(isinstance(one, float) for variant in variants for one in (variant.budget, variant.retrieved))
        return [(place,) for place in places] if fraction else super().blocks(work, places)

    def settings(self, work: Job, variant: Variant, places: Sequence[SampleKey]) -> list[list[Setting]]:
        """Return the settings that records of samples under a complete variant depend on.

        depth: the requested place of the fact, 0..1; None: the task chooses.
        source: a hash of the given haystack and files; "" for shipped ones.
        chat, system, thinking: only if given.
        max_new_tokens: only if given, or if the chat template leaves answers more room than the task does.
        """
        own = work.max_new_tokens is None and work.chat is None
        same: Setting = {
            **self.same,
            **setting_of(variant),
            "task": work.task,
            "length": work.length,
            "question": work.question,
            "probe": work.probe,
            "source": fingerprint_of(work.text, work.data),
            **({} if work.chat is None else {"chat": True, **template_setting(work.chat)}),
            **({} if own else {"max_new_tokens": work.limit(find(work.task, work.data))}),
        }
        return [[{**same, "seed": seed, "depth": depth}] for seed, depth in places]

    def compute(self, piece: Piece[Job, SampleKey], tell: Tell = lambda *_: None) -> Iterator[list[Record]]:
        job, task = piece.work, find(piece.work.task, piece.work.data)
        samples = [self._sample(task, job, *place) for place in piece.places]
        parts = self._parts(job, samples)
        sparse = job.question == "sparse"
        prompts = [context if sparse else context + question for context, question in parts]
        rests = [question if sparse else [] for _, question in parts]
        for filled in self.prefills.of(piece.variants, prompts, tell):
            settings = [one for (one,) in self.settings(job, filled.variant, piece.places)]
            yield self._lines(job, task, samples, filled, rests, settings)

    def prompts(self, job: Job, places: Sequence[SampleKey]) -> list[list[int]]:
        """Return the prompts of samples, context and question in one."""
        task = find(job.task, job.data)
        return [context + question for context, question in self._parts(job, [self._sample(task, job, *one) for one in places])]

    def _parts(self, job: Job, samples: Sequence[Sample]) -> list[tuple[list[int], list[int]]]:
        """Return the tokens of each sample's context and question. Raises ConfigError for more than the model has positions for."""
        parts = [split_prompt(self.tokenizer, sample.context, sample.question, job.chat) for sample in samples]
        for context, question in parts:
            check_prompt(self.model, len(context) + len(question))
        return parts

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
        """Send the rests of the prompts through their cache, decode, and measure.

        settings: one per row, all of the same variant.
        """
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
        timing = dict.fromkeys(SECONDS)
        if len(settings) == 1:
            timing = _timing(prompts.seconds[0], index_s, [time - start for time in times or [end]], sent=bool(rests[0]))
        records = []
        for row, (setting, sample, text) in enumerate(zip(settings, samples, answers.texts, strict=True)):
            quality = None if probe is None else probe.row(row, 0, lengths[row] + answers.steps[row])
            measures = {
                "prompt": lengths[row] + len(rests[row]),
                "output": text,
                "answers": list(sample.answers),
                "at": sample.depth,
                "accuracy": task.score(sample, spoken(text, task.stops) if job.thinks else text),
                **stats[row],
                **{name: None if quality is None else getattr(quality, name) for name in QUALITY},
                "new_tokens": answers.new_tokens[row],
                **timing,
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


def _timing(prefill_s: float, index_s: float, times: list[float], *, sent: bool) -> dict[str, float | None]:
    """Return the seconds of one sample alone.

    times: seconds at each of its tokens, or at the end if it has no token.
    sent: whether a part of the prompt was decoded after the prefill.
    """
    several = len(times) > 1
    return {
        "prefill_s": prefill_s,
        "index_s": index_s,
        "ttft_s": prefill_s + times[0] + (index_s if sent else 0.0),
        "tt2t_s": prefill_s + index_s + times[1] if several else None,
        "tpot_s": (times[-1] - times[0]) / (len(times) - 1) if several else None,
    }


_MEANS = ("retrieved", "attention_mass", "recall_at_k", "output_error", "hit_rate", "attended_mean")


SECONDS = ("prefill_s", "index_s", "ttft_s", "tt2t_s", "tpot_s")


_SAME = ("task", "method", "dense_layers", "length", "question", "model", "weights", "dtype", "device")


def summarize(records: Iterable[Record], full: Iterable[Record]) -> dict[str, Any]:
    """Summarize one variant's samples of a task at one length, and full attention's accuracy on the same samples.

    Means are over the samples that have the value.

    step_s: seconds of a decode step that up to `rows` samples share. accuracy_95: Wilson's interval.
    difference: of the accuracy to full attention's, paired by sample, with its 95 % interval.
    paired: the number of samples, and the sums of their differences and squared differences, for a mean over several
        summaries.
    asked_retrieved: the rows that the variant was asked to retrieve.
    """
    mine, dense = list(records), list(full)
    theirs = {(one["seed"], one["depth"]): one["accuracy"] for one in dense}
    gaps = [one["accuracy"] - theirs[place] for one in mine if (place := (one["seed"], one["depth"])) in theirs]
    accuracy = sum(record["accuracy"] for record in mine) / len(mine)
    return {
        **shared(mine, *_SAME),
        **{name: mine[0].setting.get(name) for name in CHAT},
        **means(mine, *_MEANS, *SECONDS),
        "step_s": mean(one.measures.get("step_s") for one in mine),
        "full_step_s": mean(one.measures.get("step_s") for one in dense),
        "rows": max(one.measures.get("rows", 1) for one in mine),
        "budget": asked_budget(mine[0]),
        "asked_retrieved": mine[0].setting["retrieved"],
        "n": len(mine),
        "accuracy": accuracy,
        "accuracy_95": wilson(accuracy, len(mine)),
        "full_accuracy": mean(theirs.values()),
        "difference": paired(gaps) if gaps else None,
        "paired": (len(gaps), sum(gaps), sum(gap * gap for gap in gaps)),
        **largest(mine, "attended_max", *BYTES),
        "seed": min(record["seed"] for record in mine),
        "versions": mine[0]["versions"],
    }
