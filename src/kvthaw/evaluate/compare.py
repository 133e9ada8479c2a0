"""Every method on the same work: a grid of tasks, lengths, methods and budgets, run piece by piece and in shards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvthaw.errors import ConfigError, KvthawError
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

    methods, budgets, retrieved, dense_layers: as for read_variants. course: what perplexity is measured on, None for none. The
    others are as for Job.
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
    course: Course | None = None
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

    All jobs get their first samples before any gets its next, so that a run that is stopped has something of everything. shard:
    (i, n) computes every n-th piece, from the i-th on; n processes with the same grid compute all of it. Raises ConfigError, before
    any work, for a setting that no cache of the model would take, and KvthawError at the end where pieces failed.
    """
    variants = [one for one in grid.variants() if runner.prefills.full or one != FULL]
    wanted = [complete(runner.model, variant) for variant in variants]
    by_job = [[(job, places) for places in runner.blocks(job)] for job in grid.jobs()]
    first, *rest = itertools.zip_longest(*by_job) if by_job else [()]
    lengths = () if grid.course is None else sorted(set(grid.course.lengths))
    courses = [replace(grid.course, lengths=(length,)) for length in lengths if grid.course is not None]
    pieces = [piece for piece in (*first, *courses, *itertools.chain(*rest)) if piece is not None]
    mine, failed = part(pieces, shard), list[str]()
    for done, piece in enumerate(mine):
        name = f"perplexity {piece.lengths[0]:,}" if isinstance(piece, Course) else f"{piece[0].task} {piece[0].length:,}"

        def doing(tokens: int, of: int, what: str, name: str = name, done: int = done) -> None:
            tell(f"{name}: {what}", done, len(mine))

        doing(0, 0, "")
        try:
            if isinstance(piece, Course):
                reader.run(piece, variants, lambda state: doing(state.tokens, state.prompt, state.doing))
            else:
                for unit in runner.missing(piece[0], wanted, piece[1]):
                    for records in runner.compute(unit, doing):
                        runner.results.add(*records)
        except KvthawError as error:  # the others have their turn
            failed.append(f"  {name}: {error}")
        tell(name, done + 1, len(mine))
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
        variant = Variant(*(record.setting[name] for name in ("method", "budget", "retrieved", "dense_layers")))
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
    asked = "-" if summary["budget"] is None else str(summary["budget"])
    if rows := summary.get("asked_retrieved"):
        asked = f"{rows} retrieved"
    return summary["method"], asked, str(summary["dense_layers"])
