"""Asks a model the questions of a benchmark under many methods: one prefill a question, its answers drawn as one batch."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvthaw.engine.hf import PreTrainedModel
from kvthaw.engine.hf.kv_dir import KvDir
from kvthaw.engine.hf.model import check_prompt
from kvthaw.engine.sampling import Sampling
from kvthaw.errors import ConfigError, at_least
from kvthaw.evaluate.answers import Answers
from kvthaw.evaluate.job import Progress, Question, Shard, Watch, check_question, part
from kvthaw.evaluate.machine import identity, versions
from kvthaw.evaluate.prefills import Prefills, Tell
from kvthaw.evaluate.probe import QUALITY, Probe
from kvthaw.evaluate.results import Record, ResultsFile, Setting
from kvthaw.evaluate.text import Chat, split_prompt, spoken
from kvthaw.evaluate.variant import FULL, Variant, complete, setting_of

from .base import Benchmark, Generation, Item, truncate

JUDGE = Generation(8)


@dataclass(frozen=True, slots=True)
class Run:
    """A benchmark's questions and how they are asked.

    generation: how answers are generated. samples: answers drawn for each. length: cut longer prompts in the middle to so many
    tokens, template not counted; None cuts nothing. chat: through the tokenizer's chat template. question: "dense" prefills it with
    the context; "sparse" sends its tokens through the sparse path one by one. judge: the name of what judges, for results. probe:
    compare every n-th step with exact attention, 0 never.
    """

    benchmark: Benchmark
    items: Sequence[Item]
    generation: Generation
    samples: int = 1
    length: int | None = None
    chat: Chat | None = None
    question: Question = "dense"
    seed: int = 0
    judge: str = ""
    probe: int = 0

    def __post_init__(self) -> None:
        at_least(1, samples=self.samples)
        if self.samples > 1 and self.generation.temperature == 0:
            raise ConfigError(f"samples is {self.samples} at temperature 0, where all are the same; give a temperature above 0")
        check_question(self.question)
        at_least(2, length=self.length)
        at_least(0, probe=self.probe)


class Examiner:
    """A model, and the answers it has given so far. full, kv_dir: as for `kvthaw.evaluate.runner.Runner`."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        results: ResultsFile | None = None,
        *,
        name: str = "model",
        full: bool = True,
        kv_dir: KvDir | None = None,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.results = ResultsFile() if results is None else results
        self._same, self.prefills = identity(model, name), Prefills(model, full, kv_dir)

    def run(
        self,
        run: Run,
        variants: Sequence[Variant],
        progress: Watch = lambda _: None,
        ask: Callable[[str], str] | None = None,
        *,
        shard: Shard = (1, 1),
    ) -> dict[Variant, list[Record]]:
        """Return the records of every variant, and of FULL, in the order of items and samples. Only what is not known is computed.

        ask: the judge, for benchmarks that take one. shard: (i, n) asks every n-th question, from the i-th on. Raises ConfigError,
        before any work, for a setting that no cache would take.
        """
        if run.chat is not None:
            run.chat.check(self.tokenizer)
        asked_for, items = (*variants, FULL) if self.prefills.full else tuple(variants), part(run.items, shard)
        wanted = [complete(self.model, variant) for variant in asked_for]
        lines: dict[Variant, list[Record]] = {variant: [] for variant in wanted}
        for number, item in enumerate(items):
            context, question = self._prompt(run, item)
            settings = {v: self._settings(run, item, context + question, v) for v in lines}
            missing = [v for v, asked in settings.items() if any(self.results.get(setting) is None for setting in asked)]

            def tell(done: int, total: int, doing: str, number: int = number) -> None:
                progress(Progress(number, len(items), done, total, doing))

            if missing:
                self._answer(run, item, context, question, {v: settings[v] for v in missing}, tell, ask)
            for variant, asked in settings.items():
                lines[variant] += [line for setting in asked if (line := self.results.get(setting)) is not None]
        progress(Progress(len(items), len(items), 0, 0, "done"))
        return {given: lines[variant] for given, variant in zip(asked_for, wanted, strict=True)}

    def ask(self, prompt: str) -> str:
        """Return a short greedy answer with full attention: this model as a judge."""
        chat = Chat() if getattr(self.tokenizer, "chat_template", None) is not None else None
        return self._ask(FULL, split_prompt(self.tokenizer, prompt, "", chat)[0], JUDGE, Sampling())

    def _prompt(self, run: Run, item: Item) -> tuple[list[int], list[int]]:
        item = truncate(self.tokenizer, item, run.length)
        context, question = split_prompt(self.tokenizer, item.context, item.question, run.chat)
        check_prompt(self.model, len(context) + len(question))
        if run.question == "dense":
            return context + question, []
        return (context, question) if context else (question[:1], question[1:])  # a cache begins with some token

    def _settings(self, run: Run, item: Item, prompt: list[int], variant: Variant) -> list[Setting]:
        """Return what each answer to a question depends on.

        item, prompt: the question's id and a hash of the prompt's tokens. sample: which of the answers drawn for it. length: where
        prompts were cut, in tokens. judge: who judged, "" where nobody does. system, thinking, probe: only where they were given.
        """
        digest = hashlib.blake2b(repr(prompt).encode(), digest_size=8).hexdigest()
        same = {
            **self._same,
            **setting_of(variant),
            "benchmark": run.benchmark.name,
            "item": item.id,
            "prompt": digest,
            "length": run.length,
            "question": run.question,
            "chat": run.chat is not None,
            **({} if run.chat is None else run.chat.setting()),
            **({"probe": run.probe} if run.probe else {}),
            "max_new_tokens": run.generation.max_new_tokens,
            "stops": list(run.generation.stops),
            "temperature": run.generation.temperature,
            "top_p": run.generation.top_p,
            "judge": run.judge,
            "seed": run.seed,
        }
        return [{**same, "sample": sample} for sample in range(run.samples)]

    def _answer(
        self,
        run: Run,
        item: Item,
        context: list[int],
        question: list[int],
        settings: dict[Variant, list[Setting]],
        tell: Tell,
        ask: Callable[[str], str] | None,
    ) -> None:
        """Answer under each variant, whose samples are one batch: if one is missing, all are drawn anew."""
        draws, rests = [_sampling(run, item, sample) for sample in range(run.samples)], [question] * run.samples
        how: dict[str, Any] = {"until": run.generation.stops, "after_first_word": False}
        for prompt in self.prefills.of(list(settings), [context], tell):
            variant, cache = prompt.variant, prompt.make()
            asked, begin = settings[variant], cache.get_seq_length()
            if len(draws) > 1:
                cache.batch_repeat_interleave(len(draws))
            probe = Probe(cache, every=run.probe, reference=None if len(draws) > 1 else prompt.full) if run.probe else None
            answers = Answers(self.model, self.tokenizer, cache, sampling=draws, **how)
            logits = prompt.logits.expand(len(draws), -1)
            for step, _ in enumerate(answers.stream(logits, rests, run.generation.max_new_tokens)):
                tell(step, len(question) + run.generation.max_new_tokens, str(variant))
            if probe is not None:
                probe.detach()
            stats, dense = cache.stats(), cache.settings.method.dense
            for row, (setting, text) in enumerate(zip(asked, answers.texts, strict=True)):
                if self.results.get(setting) is not None:
                    continue
                first, more = None, run.benchmark.follow_up(item, text)
                if more is not None:
                    next_prompt, generation = more
                    again = split_prompt(self.tokenizer, next_prompt, "", run.chat)[0]
                    first, text = text, self._ask(variant, again, generation, draws[row])
                measures = {
                    "tokens": len(context) + len(question),
                    "output": text,
                    "first": first,
                    "new_tokens": answers.new_tokens[row],
                    "ended": answers.stopped[row],
                    "scores": run.benchmark.score(item, spoken(text), ask),
                    **_watched(probe, row, begin, answers.steps[row]),
                    "attended_mean": stats.attended_mean,
                    "attended_max": stats.attended_max,
                    "hit_rate": stats.hit_rate,
                    "kv_device_bytes": stats.kv_dense_bytes if dense else stats.kv_device_bytes,
                    "kv_dense_bytes": 0 if dense else stats.kv_dense_bytes,
                    "kv_host_bytes": stats.kv_host_bytes,
                    "versions": versions(),
                }
                self.results.add(Record(setting, measures))

    def _ask(self, variant: Variant, prompt: list[int], generation: Generation, sampling: Sampling) -> str:
        check_prompt(self.model, len(prompt))
        how: dict[str, Any] = {"until": generation.stops, "after_first_word": False}
        for filled in Prefills(self.model, self.prefills.full).of([variant], [prompt], lambda *_: None):
            answers = Answers(self.model, self.tokenizer, filled.make(), sampling=sampling, **how)
            for _ in answers.stream(filled.logits, [[]], generation.max_new_tokens):
                pass
        return answers.texts[0]


def _watched(probe: Probe | None, row: int, begin: int, steps: int) -> dict[str, Any]:
    """Return how good an answer's selections were. drift: their recall in each quarter of its steps."""
    if probe is None:
        return {}
    whole, edges = probe.row(row, begin, begin + steps), [begin + steps * k // 4 for k in range(5)]
    quarters = [probe.row(row, a, b) for a, b in itertools.pairwise(edges)]
    return {name: whole and getattr(whole, name) for name in QUALITY} | {"drift": [q and q.recall_at_k for q in quarters]}


def _sampling(run: Run, item: Item, sample: int) -> Sampling:
    """How an answer is drawn: with the same seed under every variant, so that differences between variants are paired."""
    text = f"{run.seed} {run.benchmark.name} {item.id} {sample}"
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())
    return Sampling(run.generation.temperature, top_p=run.generation.top_p, seed=seed)
