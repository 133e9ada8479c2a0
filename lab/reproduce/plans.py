"""Plans over what evaluates: published benchmarks, tasks, perplexity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from kvthaw.evaluate.results import Record, mean
from kvthaw.evaluate.variant import FULL, Variant, complete
from lab.evaluate.job import EVEN_DEPTHS, Job
from lab.evaluate.perplexity import Course, Reader
from lab.evaluate.perplexity import summarize as summarize_perplexity
from lab.evaluate.published import BENCHMARKS
from lab.evaluate.published.results import summarize
from lab.evaluate.published.runner import Examiner, Run
from lab.evaluate.runner import Runner
from lab.evaluate.tasks import find
from lab.reproduce.experiment import Cell, Cells
from lab.reproduce.lab import Lab

QUICK = 448
"""Tokens of a quick prompt."""


class Score(NamedTuple):
    """A benchmark's metric: "score" is avg@k, "pass" pass@k of all samples; others as the benchmark counts them.

    scale: 100 for per cent.
    """

    benchmark: str
    metric: str = "score"
    scale: float = 100


@dataclass(frozen=True)
class Scores:
    """Published benchmarks, asked as published.

    mean: the column that is the mean of all others.
    length: where prompts are cut in the middle.
    samples, new_tokens: of a benchmark, 1 and its own if not there.
    options: what a benchmark adds to a method's.
    each_head: budgets are of each query head, see Lab.variant.
    """

    columns: Mapping[str, Score]
    length: int | None = None
    samples: Mapping[str, int] = field(default_factory=dict)
    new_tokens: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    mean: str = ""
    each_head: bool = False

    @property
    def benchmarks(self) -> list[str]:
        """The benchmarks whose data are read."""
        return list(dict.fromkeys(score.benchmark for score in self.columns.values() if score.benchmark))

    @cached_property
    def needs(self) -> str:
        """The benchmarks' data."""
        names = dict.fromkeys(family(score.benchmark) for score in self.columns.values() if score.benchmark)
        return f"--model, --data ({', '.join(names)}: a folder, or hub)"

    def measure(self, lab: Lab, rows: Sequence[str]) -> Cells:
        examiner = Examiner(*lab.loaded, lab.results, name=lab.name or "model")
        cells, names = Cells(), self.benchmarks[: 1 if lab.quick else None]
        for name in names:
            run, variants = (
                self._run(lab, name),
                {row: lab.variant(self._written(row, name), each_head=self.each_head) for row in rows},
            )
            count = f"n={len(run.items)}" + f" x {run.samples}" * (run.samples > 1)
            found: dict[Variant, list[Record]] = {}
            columns = [column for column, score in self.columns.items() if score.benchmark == name]
            with lab.attempt(columns):
                found = examiner.run(run, list(dict.fromkeys(variants.values())), lab.tell)
            for row, variant in variants.items():
                on = f"{lab.on}, {said(lab, variant)}, {'a stand-in for ' * lab.quick}{name}, {count}"
                for column in columns if found else ():
                    value = metric(found[variant], self.columns[column])
                    if value is not None:
                        cells[row, column] = Cell(value, on)
        if self.mean:
            others = [column for column, score in self.columns.items() if score.benchmark in names]
            for row in rows:
                values = [cells[row, column].value for column in others if (row, column) in cells]
                if len(values) == len(others):
                    on = cells[row, others[0]].on if len(names) == 1 else f"{lab.on}, the mean of {len(others)} columns"
                    cells[row, self.mean] = Cell(mean(float(v) for v in values if v is not None), on)
        return cells

    def _written(self, row: str, name: str) -> str:
        more = self.options.get(name, {}).get(row.partition(":")[0])
        return f"{row}:{more}" if more else row

    def _run(self, lab: Lab, name: str) -> Run:
        most = self.new_tokens.get(name)
        benchmark = BENCHMARKS[name.removesuffix("_cot") if lab.quick else name]
        generation = replace(
            benchmark.generation, max_new_tokens=3 if lab.quick else most or benchmark.generation.max_new_tokens
        )
        samples = min(2 if lab.quick else 99, self.samples.get(name, 1))
        return Run(
            benchmark, lab.items(benchmark), generation, samples, QUICK // 2 if lab.quick else self.length, lab.chat(benchmark)
        )


def metric(records: Sequence[Record], score: Score) -> float | None:
    """Return a metric of one variant's answers, or None where no question has it."""
    if score.metric == "pass":
        return score.scale * float(max(summarize(records)["pass_at"].items())[1])
    value = mean(record["scores"].get(score.metric) for record in records)
    return None if value is None else score.scale * value


@dataclass(frozen=True)
class Asked:
    """Tasks that are made.

    columns: -> task, and the length of the prompt in tokens; in words, if `words`.
    depths: where the facts stand.
    each_head: budgets are of each query head, see Lab.variant.
    """

    columns: Mapping[str, tuple[str | tuple[str, ...], int]]
    samples: int
    depths: tuple[float, ...] = EVEN_DEPTHS
    words: bool = False
    text: bool = False
    each_head: bool = False

    @property
    def needs(self) -> str:
        """A model."""
        return "--model" + ", --text (the essays that RULER hides needles in)" * self.text

    def measure(self, lab: Lab, rows: Sequence[str]) -> Cells:
        runner = Runner(*lab.loaded, lab.results, name=lab.name or "model")
        variants, cells = {row: lab.variant(row, each_head=self.each_head) for row in rows}, Cells()
        different = list(dict.fromkeys(variants.values()))
        for column, (names, size) in self.columns.items():
            tasks = ("passkey",) if lab.quick else (names,) if isinstance(names, str) else names
            records: dict[Variant, list[Record]] = {}
            with lab.attempt([column]):
                found = [runner.run(self._job(lab, task, size), different, lab.tell) for task in tasks]
                records = {one: [record for each in found for record in each[one]] for one in different}
            for row, variant in variants.items() if records else ():
                mine = records[variant]
                about = f"{'+'.join(tasks)}, {mine[0]['prompt']:,} tokens, n={len(mine)}"
                value = mean(record["accuracy"] for record in mine)
                depths = sorted({record["depth"] for record in mine if record["depth"] is not None})
                parts = {d: 100 * (mean(r["accuracy"] for r in mine if r["depth"] == d) or 0.0) for d in depths}
                cells[row, column] = Cell(100 * (value or 0.0), f"{lab.on}, {said(lab, variant)}, {about}", parts)
        return cells

    def _job(self, lab: Lab, task: str, size: int) -> Job:
        if lab.quick:
            return Job(task, QUICK, 1, depths=(0.5,), probe=0)
        length = self._tokens(lab, task, size) if self.words else size
        return Job(task, length, lab.limit or self.samples, depths=self.depths, probe=0, text=lab.text)

    def _tokens(self, lab: Lab, task: str, words: int) -> int:
        """Return about how many tokens a prompt of `words` words has."""
        sample, at = find(task).sample(lab.loaded[1], length=4096, seed=0), 4096
        return words * at // len(sample.prompt.split())


@dataclass(frozen=True)
class Read:
    """Perplexity of a book after growing lengths, a column each.

    The column "deviation" is the largest difference from full attention's at any of them.
    """

    lengths: tuple[int, ...]
    steps: int
    samples: int
    needs: str = "--model, --text (a book of PG19 of 32k tokens)"

    @property
    def columns(self) -> list[str]:
        """The lengths, and the largest deviation."""
        return [*map(str, self.lengths), "deviation"]

    def measure(self, lab: Lab, rows: Sequence[str]) -> Cells:
        reader = Reader(*lab.loaded, lab.results, name=lab.name or "model", batch=1)
        lengths = {n: max(64, QUICK * n // max(self.lengths)) if lab.quick else n for n in self.lengths}
        steps, samples = (2, 1) if lab.quick else (self.steps, self.samples)
        variants, cells = {row: lab.variant(row) for row in rows}, Cells()
        different = list(dict.fromkeys(variants.values()))
        found: dict[int, dict[Variant, list[Record]]] = {}
        for asked, length in lengths.items():
            with lab.attempt([str(asked)]):
                found[length] = reader.run(Course(length, steps, samples, text=lab.text), different, lab.tell)
        for row, variant in variants.items():
            by_length = {n: summarize_perplexity(some[variant], some[FULL]) for n, some in found.items()}
            on = f"{lab.on}, {said(lab, variant)}, {'the book that ships' if lab.text is None else '--text'}, n={samples}"
            for asked, length in lengths.items():
                if length in found:
                    cells[row, str(asked)] = Cell(by_length[length]["perplexity"], f"{on}, {length:,} tokens")
            if len(by_length) < len(set(lengths.values())):
                continue
            apart = max(one["perplexity"] - one["full_perplexity"] for one in by_length.values())
            cells[row, "deviation"] = Cell(apart, on)
        return cells


def said(lab: Lab, variant: Variant) -> str:
    """Return a variant with all of its limits, in a few words."""
    return complete(lab.loaded[0], variant).label


def family(name: str) -> str:
    return "longbench" if name.startswith("longbench_") and "v2" not in name else name.removesuffix("_cot")
