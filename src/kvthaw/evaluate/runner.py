"""Runs a task under many methods and budgets: one prefill a sample serves them all."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import transformers

import kvthaw
from kvthaw.engine.hf import Cache
from kvthaw.errors import ConfigError
from kvthaw.evaluate.decode import TextStream, check_prompt, decode, forward, prefill, stop_tokens
from kvthaw.evaluate.model import fingerprint
from kvthaw.evaluate.probe import Probe
from kvthaw.evaluate.results import Line, Results, Setting
from kvthaw.evaluate.tasks import Sample, Task, find
from kvthaw.evaluate.tasks.base import fingerprint_of
from kvthaw.methods import resolve

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

Question = Literal["dense", "sparse"]
EVEN_DEPTHS = tuple(i / 100 for i in range(0, 100, 5))
"""0 to 95 % in steps of 5."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to attend. dense_layers None: what `kvthaw.Cache` takes for the model."""

    method: str
    budget: int | float | None = None
    retrieved: int | None = None
    dense_layers: int | None = None


FULL = Variant("full")


@dataclass(frozen=True, slots=True)
class Job:
    """Samples of one task at one length.

    length: tokens of context and question. depths: where the samples' facts stand, 0..1, in turn; empty leaves it to the task.
    question: "dense" prefills it with the context; "sparse" caches the context and sends the question's tokens through the
    sparse path one by one. probe: observe every n-th step, 0 for none. text: the haystack, the book that ships if None. data: files
    that the task's questions come from instead of what ships.
    """

    task: str
    length: int
    samples: int
    seed: int = 0
    depths: tuple[float, ...] = EVEN_DEPTHS
    question: Question = "dense"
    probe: int = 2
    text: str | None = None
    data: Path | None = None

    def __post_init__(self) -> None:
        find(self.task)
        if self.question not in ("dense", "sparse"):
            raise ConfigError(f"question is {self.question!r}; it must be dense or sparse")
        for name, least in (("length", 1), ("samples", 1), ("probe", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise ConfigError(f"a depth is {depth}; it must lie between 0 and 1")

    def cells(self) -> list[tuple[int, float | None]]:
        """(seed, depth) of every sample. Fewer samples than depths are spread over them evenly."""
        if not self.depths:
            return [(self.seed + i, None) for i in range(self.samples)]
        count = len(self.depths)
        spread = [i * count // self.samples if self.samples < count else i % count for i in range(self.samples)]
        return [(self.seed + i, self.depths[place]) for i, place in enumerate(spread)]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is: samples done of all, and tokens prefilled of the sample at hand."""

    samples: int
    of: int
    tokens: int
    prompt: int
    doing: str


class Runner:
    """A model, and the results it has given so far."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, results: Results | None = None, *, name: str = "model") -> None:
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.results = Results() if results is None else results
        self._stops = stop_tokens(model, tokenizer)
        self._same = identity(model, name)

    def run(
        self, job: Job, variants: Sequence[Variant], progress: Callable[[Progress], None] | None = None
    ) -> dict[Variant, list[Line]]:
        """The lines of every variant, and of FULL, in the order of job.cells(). Only what the results do not hold is computed.

        Raises ConfigError, before any work, for a setting that no cache would take.
        """
        wanted = [complete(self.model, variant) for variant in (*variants, FULL)]
        task, source = find(job.task, job.data), fingerprint_of(job.text, job.data)
        cells = job.cells()
        for number, (seed, depth) in enumerate(cells):
            settings = {v: self._setting(job, v, source, seed, depth) for v in dict.fromkeys(wanted)}
            missing = {v: s for v, s in settings.items() if self.results.get(s) is None}
            if missing:
                sample = self._sample(task, job, seed, depth)

                def tell(done: int, total: int, doing: str, number: int = number) -> None:
                    if progress is not None:
                        progress(Progress(number, len(cells), done, total, doing))

                for line in self._lines(task, job, sample, missing, tell):
                    self.results.add(line)
        if progress is not None:
            progress(Progress(len(cells), len(cells), 0, 0, "done"))
        found: dict[Variant, list[Line]] = {}
        for asked, variant in zip((*variants, FULL), wanted, strict=True):
            lines = [self.results.get(self._setting(job, variant, source, *cell)) for cell in cells]
            found[asked] = [line for line in lines if line is not None]
        return found

    def _setting(self, job: Job, variant: Variant, source: str, seed: int, depth: float | None) -> Setting:
        return Setting(
            task=job.task,
            length=job.length,
            seed=seed,
            depth=depth,
            question=job.question,
            method=variant.method,
            budget=variant.budget,
            retrieved=variant.retrieved,
            dense_layers=variant.dense_layers or 0,
            probe=job.probe,
            source=source,
            **self._same,
        )

    def _sample(self, task: Task, job: Job, seed: int, depth: float | None) -> Sample:
        try:
            return task.sample(self.tokenizer, length=job.length, seed=seed, depth=depth, text=job.text)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def _lines(
        self, task: Task, job: Job, sample: Sample, settings: dict[Variant, Setting], tell: Callable[[int, int, str], None]
    ) -> Iterator[Line]:
        """Prefill once, then fork for each variant."""
        context, question = split_prompt(self.tokenizer, sample)
        check_prompt(self.model, len(context) + len(question))
        prompt = context if job.question == "sparse" else context + question
        rest = question if job.question == "sparse" else []
        base = Cache(self.model, "full")
        start = now(self.model.device)
        logits = prefill(self.model, base, prompt, progress=lambda done, total: tell(done, total, "prefill"))
        prefill_s = now(self.model.device) - start
        for variant, setting in settings.items():
            tell(len(prompt), len(prompt), f"{variant.method} {variant.budget or ''}".strip())
            yield self._line(task, setting, sample, base, logits, rest, prefill_s)

    def _line(
        self, task: Task, setting: Setting, sample: Sample, base: Cache, logits: Tensor, rest: list[int], prefill_s: float
    ) -> Line:
        """Fork the prompt's cache, send the rest of the prompt through it, decode, and measure."""
        device = self.model.device
        start = now(device)
        budget = {} if setting.method == "full" else {"budget": setting.budget, "retrieved": setting.retrieved}
        cache = base.fork(setting.method, dense_layers=setting.dense_layers, **budget)
        cache.wait()
        index_s = now(device) - start
        probe = Probe(cache, every=setting.probe, reference=base) if setting.probe else None

        def clock() -> float:
            return now(device) - (0.0 if probe is None else probe.seconds)

        start = clock()
        answer = Answer(self.model, self.tokenizer, cache, self._stops, task.stops)
        times = [clock() for _ in answer.stream(logits, rest, task.max_new_tokens)]
        stats, text = cache.stats(), answer.text
        quality = None if probe is None or not probe.observations else probe.quality()
        dense = resolve(setting.method).dense
        first = times[0] - start if times else clock() - start
        return Line(
            setting=setting,
            prompt=base.get_seq_length() + len(rest),
            output=text,
            answers=sample.answers,
            at=sample.depth,
            accuracy=task.score(sample, text),
            held_budget=stats.budget,
            retrieved=stats.retrieved,
            attended_mean=stats.attended_mean,
            attended_max=stats.attended_max,
            attention_mass=None if quality is None else quality.attention_mass,
            recall_at_k=None if quality is None else quality.recall_at_k,
            output_error=None if quality is None else quality.output_error,
            hit_rate=stats.hit_rate,
            sparse_steps=stats.sparse_steps,
            kv_device_bytes=stats.kv_dense_bytes if dense else stats.kv_device_bytes,
            kv_dense_bytes=0 if dense else stats.kv_dense_bytes,
            kv_host_bytes=stats.kv_host_bytes,
            new_tokens=len(times),
            prefill_s=prefill_s,
            index_s=index_s,
            ttft_s=prefill_s + first + (index_s if rest else 0.0),
            tt2t_s=prefill_s + index_s + times[1] - start if len(times) > 1 else None,
            tpot_s=(times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None,
            versions=versions(),
        )


def complete(model: PreTrainedModel, variant: Variant) -> Variant:
    """The variant with nothing left open. Raises ConfigError for settings that no cache of the model would take."""
    if resolve(variant.method).dense:
        return FULL
    cache = Cache(model, variant.method, budget=variant.budget, retrieved=variant.retrieved, dense_layers=variant.dense_layers)
    budget = 256 if variant.budget is None and variant.retrieved is None else variant.budget
    return replace(variant, budget=budget, dense_layers=cache.settings.dense_layers)


def identity(model: PreTrainedModel, name: str) -> dict[str, str]:
    """What a result depends on besides its job and variant: the model, how it runs, and kvthaw's version."""
    return {
        "model": name,
        "weights": fingerprint(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": device_name(model.device),
        "kvthaw": kvthaw.__version__,
    }


class Answer:
    """One answer from a cache that holds a context: the question, then greedy decoding to a stop token, a text of `ends` or the
    limit."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        cache: Cache,
        stops: frozenset[int],
        ends: tuple[str, ...] = ("\n",),
    ) -> None:
        self.model, self.cache, self.stops, self.ends = model, cache, stops, ends
        self._stream = TextStream(tokenizer)

    @property
    def text(self) -> str:
        """The answer so far, without the text that ended it."""
        return cut(self._stream.text, self.ends)

    def stream(self, logits: Tensor, question: Sequence[int], limit: int) -> Iterator[str]:
        """The text that each token adds. question: tokens not in the cache yet; a sparse cache takes them one by one, so that
        each attends under the budget. logits [V]: those after the last token of the cache, used where question is empty."""
        if question and self.cache.settings.method.dense:
            logits = forward(self.model, self.cache, question)
        else:
            for token in question:
                logits = forward(self.model, self.cache, [token])
        for token in decode(self.model, self.cache, logits, limit=limit, stops=self.stops):
            before = cut(self._stream.shown, self.ends)
            self._stream.push(token)
            yield cut(self._stream.shown, self.ends)[len(before) :]
            if ended(self._stream.shown, self.ends):
                return


def ended(text: str, ends: Sequence[str] = ("\n",)) -> bool:
    """Whether an answer has come to one of `ends`; those before its first word do not count."""
    return any(end in text.lstrip() for end in ends)


def cut(text: str, ends: Sequence[str] = ("\n",)) -> str:
    """An answer up to the first of `ends`."""
    start = len(text) - len(text.lstrip())
    return text[: min((at for end in ends if (at := text.find(end, start)) >= 0), default=len(text))]


def split_prompt(tokenizer: Any, sample: Sample) -> tuple[list[int], list[int]]:
    """The tokens of context and question, together those of the whole prompt: a token that spans both is the question's."""
    whole: list[int] = list(tokenizer(sample.prompt)["input_ids"])
    alone: list[int] = list(tokenizer(sample.context)["input_ids"])
    same = 0
    for a, b in zip(whole, alone, strict=False):
        if a != b:
            break
        same += 1
    return whole[:same], whole[same:]


def versions() -> dict[str, str]:
    """What a result was made with."""
    return {
        "kvthaw": kvthaw.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def device_name(device: torch.device) -> str:
    """The GPU's name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def now(device: torch.device) -> float:
    """Seconds, after all that the device was asked for is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
