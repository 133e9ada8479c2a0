"""Every method on the same work: a grid of tasks, lengths, methods and budgets, run in pieces and shards; summaries of it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvthaw.engine.chat_template import Chat
from kvthaw.errors import ConfigError, KvthawError
from kvthaw.evaluate.agreement import STEPS, Comparison, Prompt, longest
from kvthaw.evaluate.agreement import summarize as summarize_agreement
from kvthaw.evaluate.evaluator import Evaluator
from kvthaw.evaluate.results import Record
from kvthaw.evaluate.variant import FULL, Variant, complete, read_variants
from lab.evaluate.job import EVEN_DEPTHS, Job, Question
from lab.evaluate.perplexity import summarize as summarize_perplexity
from lab.evaluate.prefills import Shard, part
from lab.evaluate.published.results import summarize as summarize_benchmark
from lab.evaluate.published.runner import Examiner, Run
from lab.evaluate.runner import Runner, summarize

Tell = Callable[[str, int, int], None]
"""Called with a description of the current or latest piece, the number of pieces done, and their total."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Every task at every length under every method, budget and protocol.

    methods, budgets, retrieved, dense_layers: as for read_variants.
    data: the files of each task. The others are as for Job.
    """

    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    budgets: tuple[int | float, ...]
    lengths: tuple[int, ...]
    samples: int
    questions: tuple[Question, ...] = ("dense",)
    dense_layers: tuple[int, ...] = (0,)
    seed: int = 0
    probe: int = 0
    depths: tuple[float, ...] = EVEN_DEPTHS
    retrieved: tuple[int, ...] = ()
    chat: Chat | None = None
    text: str | None = None
    data: Mapping[str, Path] = field(default_factory=dict)

    def jobs(self) -> list[Job]:
        """Return a job a task, length and protocol. Raises ConfigError for what no job can be."""
        return [
            Job(
                task,
                length,
                self.samples,
                self.seed,
                self.depths,
                question,
                self.probe,
                self.text,
                self.data.get(task),
                self.chat,
            )
            for task, length, question in itertools.product(self.tasks, self.lengths, self.questions)
        ]

    def variants(self) -> list[Variant]:
        """Return full attention, and every method under every limit; see read_variants."""
        return list(dict.fromkeys((FULL, *read_variants(self.methods, self.budgets, self.retrieved, self.dense_layers))))


Work = tuple[Evaluator[Any, Any], Any]
"""A piece of work, and what does it."""


def agreement(runner: Runner, examiner: Examiner, jobs: Iterable[Job], runs: Iterable[Run]) -> Comparison | None:
    """Return the prompts of a fifth of the samples of jobs and runs, to compare next tokens on; None if every prompt is too
    long for the model once these tokens are added."""
    made: dict[Prompt, None] = {}
    most = longest(runner.model, STEPS)
    asked = [partial(runner.prompts, job, job.cells()[: fifth(job.samples)]) for job in jobs]
    asked += [partial(examiner.prompts, run, run.items[: fifth(len(run.items))]) for run in runs]
    for prompts in asked:
        with contextlib.suppress(ConfigError):  # the samples themselves raise it in their turn
            made |= dict.fromkeys(Prompt(tuple(tokens)) for tokens in prompts() if len(tokens) <= most)
    return Comparison(tuple(made), STEPS) if made else None


def fifth(samples: int) -> int:
    """Return how many of the samples perplexity and agreement take."""
    return max(1, samples // 5)


def run(work: Sequence[Work], variants: Iterable[Variant], *, shard: Shard = (1, 1), tell: Tell = lambda *_: None) -> None:
    """Compute what evaluators' results lack of their work under variants.

    All work gets its first samples before any gets its next, so that a run that is stopped has something of everything.
    shard: (i, n) computes every n-th piece, from the i-th on; n processes with the same work compute all of it. Raises
        ConfigError, before any work, for a setting that no cache of the model would take, and KvthawError at the end where
        pieces failed.
    """
    asked = list(variants)
    wanted = {by: [complete(by.model, one) for one in asked if by.prefills.full or one != FULL] for by, _ in work}
    in_turn = itertools.zip_longest(*([(by, one, block) for block in by.blocks(one, by.places(one))] for by, one in work))
    mine = part([piece for turn in in_turn for piece in turn if piece is not None], shard)
    failed = list[str]()
    for done, (by, one, block) in enumerate(mine):

        def doing(tokens: int, of: int, what: str, name: str = str(one), done: int = done) -> None:
            tell(f"{name}: {what}", done, len(mine))

        doing(0, 0, "")
        try:
            for piece in by.missing(one, wanted[by], block):
                for records in by.compute(piece, doing):
                    by.results.add(*records)
        except KvthawError as error:  # the others have their turn
            failed.append(f"  {one}: {error}")
        tell(str(one), done + 1, len(mine))
    if failed:
        raise KvthawError("\n".join((f"{len(failed)} pieces gave no results; the same command tries them again", *failed)))


@dataclass(frozen=True, slots=True)
class Summaries:
    """Of tasks, by task, length, protocol and variant; of perplexity, by length and variant; of benchmarks, by benchmark, protocol
    and variant; of agreement with full attention, by variant."""

    tasks: list[dict[str, Any]]
    perplexities: list[dict[str, Any]]
    benchmarks: list[dict[str, Any]]
    agreements: list[dict[str, Any]]


def check_texts(records: Iterable[Record], wanted: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raise ConfigError if the records of a task, known or wanted, use two texts, which a report would mix.

    wanted: by task, or "perplexity", the name of the wanted text in settings.
    """
    found = dict[str, Any](wanted)
    for record in records:
        setting, over = record.setting, "text" if "nll" in record.measures else "source"
        name, text = "perplexity" if over == "text" else setting.get("task"), setting.get(over)
        if name is not None and found.setdefault(name, text) != text:
            raise ConfigError(
                f"{name} has results over another text in this folder, and one report is of one text: name another --out"
            )


def summaries(records: Iterable[Record]) -> Summaries:
    """Summarize records. Raises ConfigError if they mix models, devices, versions or texts, which cannot be compared."""
    records = list(records)
    check_texts(records)
    kinds: dict[str, dict[str, Cells]] = {measure: {} for measure in _WORK}
    about = set()
    for record in records:
        about.add(" ".join(str(record[name]) for name in ("model", "weights", "dtype", "device", "kvthaw")))
        kind = next(measure for measure in _WORK if measure in record.measures)
        work = " ".join(str(record.setting.get(name)) for name in _WORK[kind])
        kinds[kind].setdefault(work, {}).setdefault(Variant.of(record.setting), []).append(record)
    if len(about) > 1:
        raise ConfigError(f"the results are of {len(about)} settings, and one report compares one: {'; '.join(sorted(about))}")
    return Summaries(
        [summarize(some, _full(cells)) for cells in kinds["accuracy"].values() for some in cells.values()],
        [one for cells in kinds["nll"].values() for one in _perplexities(cells)],
        [summarize_benchmark(some, _full(cells)) for cells in kinds["scores"].values() for some in cells.values()],
        [summarize_agreement(some) for cells in kinds["kl"].values() for some in cells.values()],
    )


Cells = dict[Variant, list[Record]]
_ASKED = ("length", "question", "chat", "system", "thinking", "max_new_tokens", "probe")
_WORK = {
    "nll": ("length", "steps", "text"),
    "kl": ("steps", "answer"),
    "scores": ("benchmark", *_ASKED, "stops", "temperature", "top_p", "judge"),
    "accuracy": ("task", "source", *_ASKED),
}
"""A measure that only one kind of record has -> the key of such a record's work."""


def _full(cells: Cells) -> Sequence[Record]:
    return next((of for variant, of in cells.items() if variant.method == "full"), ())


def _perplexities(cells: Cells) -> list[dict[str, Any]]:
    """Only of the samples that full attention has, too, if it has any."""
    full = {one["seed"]: one for variant, of in cells.items() if variant.method == "full" for one in of}
    pairs = ([one for one in some if not full or one["seed"] in full] for some in cells.values())
    return [summarize_perplexity(some, [full[one["seed"]] for one in some] if full else []) for some in pairs if some]
