"""Every method on the same work: a grid of tasks, lengths, methods and budgets, run piece by piece and in shards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvthaw.errors import ConfigError, KvthawError
from kvthaw.evaluate.evaluator import Evaluator
from kvthaw.evaluate.job import EVEN_DEPTHS, Job, Question, Shard, part
from kvthaw.evaluate.perplexity import Course, Reader
from kvthaw.evaluate.perplexity import summarize as summarize_perplexity
from kvthaw.evaluate.results import Record, summarize
from kvthaw.evaluate.runner import Runner
from kvthaw.evaluate.text import Chat
from kvthaw.evaluate.variant import FULL, Variant, complete, read_variants

Tell = Callable[[str, int, int], None]
"""Is told what is computed or was computed last, and how many pieces of how many are done."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Every task at every length under every method, budget and protocol.

    methods, budgets, retrieved, dense_layers: as for read_variants. courses: what perplexity is measured on. The others are as for
    Job.
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
    courses: tuple[Course, ...] = ()
    retrieved: tuple[int, ...] = ()
    chat: Chat | None = None
    text: str | None = None

    def jobs(self) -> list[Job]:
        """Return a job a task, length and protocol. Raises ConfigError for what no job can be."""
        return [
            Job(task, length, self.samples, self.seed, self.depths, question, self.probe, self.text, chat=self.chat)
            for task, length, question in itertools.product(self.tasks, self.lengths, self.questions)
        ]

    def variants(self) -> list[Variant]:
        """Return full attention, and every method under every limit; see read_variants."""
        return list(dict.fromkeys((FULL, *read_variants(self.methods, self.budgets, self.retrieved, self.dense_layers))))


def run(runner: Runner, reader: Reader, grid: Grid, *, shard: Shard = (1, 1), tell: Tell = lambda *_: None) -> None:
    """Compute what the runner's and the reader's results lack of a grid.

    All work gets its first samples before any gets its next, so that a run that is stopped has something of everything. shard:
    (i, n) computes every n-th piece, from the i-th on; n processes with the same grid compute all of it. Raises ConfigError, before
    any work, for a setting that no cache of the model would take, and KvthawError at the end where pieces failed.
    """
    wanted = [complete(runner.model, one) for one in grid.variants() if runner.prefills.full or one != FULL]
    work: list[tuple[Evaluator[Any, Any], Any]] = [(runner, job) for job in grid.jobs()]
    work += [(reader, course) for course in grid.courses]
    in_turn = itertools.zip_longest(*([(by, one, block) for block in by.blocks(one, by.places(one))] for by, one in work))
    mine = part([piece for turn in in_turn for piece in turn if piece is not None], shard)
    failed = list[str]()
    for done, (by, one, block) in enumerate(mine):

        def doing(tokens: int, of: int, what: str, name: str = str(one), done: int = done) -> None:
            tell(f"{name}: {what}", done, len(mine))

        doing(0, 0, "")
        try:
            for piece in by.missing(one, wanted, block):
                for records in by.compute(piece, doing):
                    by.results.add(*records)
        except KvthawError as error:  # the others have their turn
            failed.append(f"  {one}: {error}")
        tell(str(one), done + 1, len(mine))
    if failed:
        raise KvthawError("\n".join((f"{len(failed)} pieces gave no results; the same command tries them again", *failed)))


def summaries(records: Iterable[Record]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Summarize records by task, length, protocol and variant, and those of perplexity by length and variant.

    Raises ConfigError where they are of several models, devices or versions: those are not one comparison.
    """
    tasks, stretches, about = dict[str, Cells](), dict[str, Cells](), set()
    for record in records:
        about.add(" ".join(str(record[name]) for name in ("model", "weights", "dtype", "device", "kvthaw")))
        kind, names = (stretches, ("length", "steps", "text")) if "nll" in record.measures else (tasks, _JOB)
        variant = Variant.of(record.setting)
        work = " ".join(str(record.setting.get(name)) for name in names)
        kind.setdefault(work, {}).setdefault(variant, []).append(record)
    if len(about) > 1:
        raise ConfigError(f"the results are of {len(about)} settings, and one report compares one: {'; '.join(sorted(about))}")
    found = [
        summarize(some, next((of for variant, of in cells.items() if variant.method == "full"), ()))
        for cells in tasks.values()
        for some in cells.values()
    ]
    return found, [one for cells in stretches.values() for one in _perplexities(cells)]


Cells = dict[Variant, list[Record]]
_JOB = ("task", "length", "question", "source", "probe", "chat", "system", "thinking", "max_new_tokens")


def _perplexities(cells: Cells) -> list[dict[str, Any]]:
    """Only of the samples that full attention has, too, if it has any."""
    full = {one["seed"]: one for variant, of in cells.items() if variant.method == "full" for one in of}
    pairs = ([one for one in some if not full or one["seed"] in full] for some in cells.values())
    return [summarize_perplexity(some, [full[one["seed"]] for one in some] if full else []) for some in pairs if some]


def named(summary: dict[str, Any]) -> Sequence[str]:
    """Return a variant in the words of a table's first columns: its method, what it was asked for, and its dense layers."""
    asked = Variant.of(summary)
    return asked.method, asked.limit or "-", str(asked.dense_layers)
