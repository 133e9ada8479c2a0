"""Asks a model the questions of a benchmark under many methods: one prefill a question, its answers drawn as one batch."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvthaw.engine.chat_template import Chat, split_prompt
from kvthaw.engine.hf import Cache
from kvthaw.engine.hf.model import check_prompt
from kvthaw.engine.sampling import Sampling
from kvthaw.errors import ConfigError, at_least
from kvthaw.evaluate.evaluator import Evaluator, Piece
from kvthaw.evaluate.machine import versions
from kvthaw.evaluate.prefills import Tell
from kvthaw.evaluate.results import Record, Setting
from kvthaw.evaluate.variant import FULL, Variant, setting_of
from lab.evaluate.answers import Answers, spoken
from lab.evaluate.job import Question, check_question, template_setting
from lab.evaluate.prefills import KeptPrefills, OwnPrefills
from lab.evaluate.probe import QUALITY, Probe

from .base import Benchmark, Generation, Item, truncate

JUDGE = Generation(8)


@dataclass(frozen=True, slots=True)
class Run:
    """A benchmark's questions and how they are asked.

    generation: how answers are generated.
    samples: answers drawn for each.
    length: cut longer prompts in the middle to this number of tokens, without the template; None: cut nothing.
    chat: use the tokenizer's chat template.
    question: "dense" prefills it with the context; "sparse" sends its tokens through the sparse path one by one.
    judge: the judge's name, for results.
    probe: compare every n-th step with exact attention, 0 never.
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

    def __str__(self) -> str:
        return self.benchmark.name


class Examiner(Evaluator[Run, Item]):
    """Published benchmarks: see Evaluator. The answers to one question are one batch: if one is missing, all are drawn again.

    judge: what benchmarks that take one ask whether an answer is right.
    """

    judge: Callable[[str], str] | None = None

    def __init__(self, *given: Any, **how: Any) -> None:
        super().__init__(*given, **how)
        self._digests: dict[tuple[str, str, int | None, Chat | None], str] = {}

    def check(self, work: Run) -> None:
        if work.chat is not None:
            work.chat.check(self.tokenizer)

    def places(self, work: Run) -> Sequence[Item]:
        return work.items

    def rows(self, work: Run) -> int:
        return 1

    def settings(self, work: Run, variant: Variant, places: Sequence[Item]) -> list[list[Setting]]:
        """Return the settings that each answer to a question depends on.

        item, prompt: the question's id and a hash of the prompt's tokens.
        sample: number of the answer among the question's answers.
        length: tokens at which prompts were cut.
        judge: the judge's name; "" without a judge.
        system, thinking, probe: only if given.
        """
        same = {
            **self.same,
            **setting_of(variant),
            "benchmark": work.benchmark.name,
            "length": work.length,
            "question": work.question,
            "chat": work.chat is not None,
            **({} if work.chat is None else template_setting(work.chat)),
            **({"probe": work.probe} if work.probe else {}),
            "max_new_tokens": work.generation.max_new_tokens,
            "stops": list(work.generation.stops),
            "temperature": work.generation.temperature,
            "top_p": work.generation.top_p,
            "judge": work.judge,
            "seed": work.seed,
        }
        of_items = [{**same, "item": item.id, "prompt": self._digest(work, item)} for item in places]
        return [[{**of, "sample": sample} for sample in range(work.samples)] for of in of_items]

    def compute(self, piece: Piece[Run, Item], tell: Tell = lambda *_: None) -> Iterator[list[Record]]:
        run, (item,) = piece.work, piece.places
        context, question = self._prompt(run, item)
        draws, rests = [_sampling(run, item, sample) for sample in range(run.samples)], [question] * run.samples
        for prompt in self.prefills.of(piece.variants, [context], tell):
            variant, cache = prompt.variant, prompt.make()
            begin = cache.get_seq_length()
            if len(draws) > 1:
                cache.batch_repeat_interleave(len(draws))
            probe = Probe(cache, every=run.probe, reference=None if len(draws) > 1 else prompt.full) if run.probe else None
            answers = self._answers(cache, run.generation, draws)
            logits = prompt.logits.expand(len(draws), -1)
            for step, _ in enumerate(answers.stream(logits, rests, run.generation.max_new_tokens)):
                tell(step, len(question) + run.generation.max_new_tokens, str(variant))
            if probe is not None:
                probe.detach()
            (settings,), stats, dense = self.settings(run, variant, [item]), cache.stats(), cache.settings.method.dense
            records = []
            for row, (setting, text) in enumerate(zip(settings, answers.texts, strict=True)):
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
                    "scores": run.benchmark.score(item, spoken(text), self.judge),
                    **_watched(probe, row, begin, answers.steps[row]),
                    "attended_mean": stats.attended_mean,
                    "attended_max": stats.attended_max,
                    "hit_rate": stats.hit_rate,
                    "kv_device_bytes": stats.kv_dense_bytes if dense else stats.kv_device_bytes,
                    "kv_dense_bytes": 0 if dense else stats.kv_dense_bytes,
                    "kv_host_bytes": stats.kv_host_bytes,
                    "versions": versions(),
                }
                records.append(Record(setting, measures))
            yield records

    def prompts(self, run: Run, places: Sequence[Item]) -> list[list[int]]:
        """Return the prompts of questions, context and question in one."""
        return [context + question for context, question in (self._prompt(run, item) for item in places)]

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

    def _digest(self, run: Run, item: Item) -> str:
        """Return a hash of a prompt's tokens, made once."""
        key = item.context, item.question, run.length, run.chat
        if key not in self._digests:
            context, question = self._prompt(run, item)
            self._digests[key] = hashlib.blake2b(repr(context + question).encode(), digest_size=8).hexdigest()
        return self._digests[key]

    def _answers(self, cache: Cache, generation: Generation, sampling: Sampling | Sequence[Sampling]) -> Answers:
        how: dict[str, Any] = {"until": generation.stops, "after_first_word": False}
        return Answers(self.model, self.tokenizer, cache, sampling=sampling, **how)

    def _ask(self, variant: Variant, prompt: list[int], generation: Generation, sampling: Sampling) -> str:
        check_prompt(self.model, len(prompt))
        kind = KeptPrefills if self.prefills.full else OwnPrefills
        for filled in kind(self.model, None).of([variant], [prompt], lambda *_: None):
            answers = self._answers(filled.make(), generation, sampling)
            for _ in answers.stream(filled.logits, [[]], generation.max_new_tokens):
                pass
        return answers.texts[0]


def _watched(probe: Probe | None, row: int, begin: int, steps: int) -> dict[str, Any]:
    """Return measures of an answer's selections.

    drift: their recall in each quarter of its steps.
    """
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
