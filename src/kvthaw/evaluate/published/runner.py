"""Asks a model the questions of a benchmark under many methods: one prefill a question, its answers drawn as one batch."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import kvthaw
from kvthaw.engine.hf import Cache
from kvthaw.errors import ConfigError, at_least
from kvthaw.evaluate.decode import check_prompt, prefill, stop_tokens
from kvthaw.evaluate.job import Progress, Question, check_question
from kvthaw.evaluate.machine import identity, versions
from kvthaw.evaluate.variant import FULL, Variant, complete, fork, setting_of
from kvthaw.methods import resolve

from .base import Benchmark, Item, Plan, truncate
from .generate import Answer, generate
from .results import Answered, Answers, Asked

if TYPE_CHECKING:
    from transformers import PreTrainedModel

JUDGE = Plan(8)


@dataclass(frozen=True, slots=True)
class Run:
    """A benchmark's questions and how they are asked.

    plan: how answers are generated. samples: answers drawn for each question. length: cut longer prompts in the middle to so many
    tokens, template not counted; None cuts nothing. chat: through the tokenizer's chat template. question: "dense" prefills it with
    the context; "sparse" sends its tokens through the sparse path one by one. judge: the name of what judges, for results.
    """

    benchmark: Benchmark
    items: Sequence[Item]
    plan: Plan
    samples: int = 1
    length: int | None = None
    chat: bool = False
    question: Question = "dense"
    seed: int = 0
    judge: str = ""

    def __post_init__(self) -> None:
        at_least(1, samples=self.samples)
        if self.samples > 1 and self.plan.temperature == 0:
            raise ConfigError(f"samples is {self.samples} at temperature 0, where all are the same; give a temperature above 0")
        check_question(self.question)
        at_least(2, length=self.length)


class Examiner:
    """A model, and the answers it has given so far."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, answers: Answers | None = None, *, name: str = "model") -> None:
        self.model, self.tokenizer = model, tokenizer
        self.answers = Answers() if answers is None else answers
        self._stops = stop_tokens(model, tokenizer)
        self._same = identity(model, name)

    def run(
        self,
        run: Run,
        variants: Sequence[Variant],
        progress: Callable[[Progress], None] | None = None,
        ask: Callable[[str], str] | None = None,
        *,
        capture: bool = False,
    ) -> dict[Variant, list[Answered]]:
        """The lines of every variant, and of FULL, in the order of items and samples. Only what is not known is computed.

        ask: the judge, for benchmarks that take one. capture: on a GPU, replay steps as captured CUDA graphs (see kvthaw.attach),
        which pays where answers are long. Raises ConfigError, before any work, for a setting that no cache would take.
        """
        with kvthaw.attach(self.model, "full") if capture else nullcontext():
            return self._run(run, variants, progress, ask)

    def _run(
        self,
        run: Run,
        variants: Sequence[Variant],
        progress: Callable[[Progress], None] | None,
        ask: Callable[[str], str] | None,
    ) -> dict[Variant, list[Answered]]:
        if run.chat and getattr(self.tokenizer, "chat_template", None) is None:
            raise ConfigError("chat is asked for, but the tokenizer has no chat template; turn it off with --no-chat")
        wanted = [complete(self.model, variant) for variant in (*variants, FULL)]
        lines: dict[Variant, list[Answered]] = {variant: [] for variant in wanted}
        for number, item in enumerate(run.items):
            context, question = self._prompt(run, item)
            settings = {v: self._settings(run, item, context + question, v) for v in lines}
            missing = [v for v, asked in settings.items() if any(self.answers.get(setting) is None for setting in asked)]

            def tell(done: int, total: int, doing: str, number: int = number) -> None:
                if progress is not None:
                    progress(Progress(number, len(run.items), done, total, doing))

            if missing:
                self._answer(run, item, context, question, {v: settings[v] for v in missing}, tell, ask)
            for variant, asked in settings.items():
                lines[variant] += [line for setting in asked if (line := self.answers.get(setting)) is not None]
        if progress is not None:
            progress(Progress(len(run.items), len(run.items), 0, 0, "done"))
        return {given: lines[variant] for given, variant in zip((*variants, FULL), wanted, strict=True)}

    def ask(self, prompt: str) -> str:
        """A short greedy answer with full attention: this model as a judge."""
        chat = getattr(self.tokenizer, "chat_template", None) is not None
        return self._ask(FULL, tokens_of(self.tokenizer, prompt, "", chat)[0], JUDGE, random.Random(0))[0].text

    def _prompt(self, run: Run, item: Item) -> tuple[list[int], list[int]]:
        item = truncate(self.tokenizer, item, run.length)
        context, question = tokens_of(self.tokenizer, item.context, item.question, run.chat)
        check_prompt(self.model, len(context) + len(question))
        if run.question == "dense":
            return context + question, []
        return (context, question) if context else (question[:1], question[1:])  # a cache begins with some token

    def _settings(self, run: Run, item: Item, prompt: list[int], variant: Variant) -> list[Asked]:
        digest = hashlib.blake2b(repr(prompt).encode(), digest_size=8).hexdigest()
        first = Asked(
            benchmark=run.benchmark.name,
            item=item.id,
            prompt=digest,
            sample=0,
            length=run.length,
            question=run.question,
            chat=run.chat,
            max_new_tokens=run.plan.max_new_tokens,
            stops=run.plan.stops,
            temperature=run.plan.temperature,
            top_p=run.plan.top_p,
            judge=run.judge,
            seed=run.seed,
            **(setting_of(variant) | self._same),
        )
        return [replace(first, sample=sample) for sample in range(run.samples)]

    def _answer(
        self,
        run: Run,
        item: Item,
        context: list[int],
        question: list[int],
        settings: dict[Variant, list[Asked]],
        tell: Callable[[int, int, str], None],
        ask: Callable[[str], str] | None,
    ) -> None:
        """Prefill once, then fork for each variant, whose samples are one batch: if one is missing, all are drawn anew."""
        base = Cache(self.model, "full")
        logits = prefill(self.model, base, context, progress=lambda done, total: tell(done, total, "prefill"))
        for variant, asked in settings.items():
            name = f"{variant.method} {variant.budget or ''}".strip()
            cache = fork(base, variant)
            draws = [_numbers(run, item, sample) for sample in range(run.samples)]
            answers = generate(
                *(self.model, self.tokenizer, cache, logits, question, run.plan, draws, self._stops),
                progress=partial(_step, tell, run.plan.max_new_tokens, name),
            )
            stats = cache.stats()
            dense = resolve(variant.method).dense
            for setting, answer, numbers in zip(asked, answers, draws, strict=True):
                if self.answers.get(setting) is not None:
                    continue
                text, first = answer.text, None
                more = run.benchmark.follow_up(item, text)
                if more is not None:
                    prompt, plan = more
                    plan = replace(plan, temperature=run.plan.temperature, top_p=run.plan.top_p)
                    again = tokens_of(self.tokenizer, prompt, "", run.chat)[0]
                    first, text = text, self._ask(variant, again, plan, numbers)[0].text
                line = Answered(
                    setting=setting,
                    tokens=len(context) + len(question),
                    output=text,
                    first=first,
                    new_tokens=len(answer.tokens),
                    ended=answer.ended,
                    scores=run.benchmark.score(item, text, ask),
                    attended_mean=stats.attended_mean,
                    attended_max=stats.attended_max,
                    hit_rate=stats.hit_rate,
                    kv_device_bytes=stats.kv_dense_bytes if dense else stats.kv_device_bytes,
                    kv_dense_bytes=0 if dense else stats.kv_dense_bytes,
                    kv_host_bytes=stats.kv_host_bytes,
                    versions=versions(),
                )
                self.answers.add(line)

    def _ask(self, variant: Variant, prompt: list[int], plan: Plan, numbers: random.Random) -> list[Answer]:
        check_prompt(self.model, len(prompt))
        base = Cache(self.model, "full")
        logits = prefill(self.model, base, prompt)
        return generate(self.model, self.tokenizer, fork(base, variant), logits, [], plan, [numbers], self._stops)


def tokens_of(tokenizer: Any, context: str, question: str, chat: bool) -> tuple[list[int], list[int]]:
    """The tokens of a context and of what follows it, together those of the whole prompt; one that spans both is the question's.

    chat: as one message of a user, through the tokenizer's template, which then is the question's end.
    """
    prompt, before = context + question, context
    if chat:
        message = [{"role": "user", "content": prompt}]
        whole_text: str = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        at = whole_text.rfind(question) if question else len(whole_text)
        if at < 0:
            raise ConfigError("the chat template changes the question, so context and question cannot be told apart")
        prompt, before = whole_text, whole_text[:at]
    special = {"add_special_tokens": False} if chat else {}
    whole: list[int] = list(tokenizer(prompt, verbose=False, **special)["input_ids"])
    if prompt == before:
        return whole, []
    alone: list[int] = list(tokenizer(before, verbose=False, **special)["input_ids"]) if before else []
    same = next((i for i, (a, b) in enumerate(zip(whole, alone, strict=False)) if a != b), min(len(whole), len(alone)))
    return whole[:same], whole[same:]


def _step(tell: Callable[[int, int, str], None], most: int, doing: str, step: int) -> None:
    tell(step, most, doing)


def _numbers(run: Run, item: Item, sample: int) -> random.Random:
    """The random numbers of an answer: the same for every variant, so that differences between variants are paired."""
    return random.Random(f"{run.seed} {run.benchmark.name} {item.id} {sample}")
