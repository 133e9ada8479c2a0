"""kvthaw compare: every method on the same work, and one report."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvthaw.bench.options import budget_of
from kvthaw.cli import options
from kvthaw.cli.common import bars, load_model, stderr, stdout, tell_outdated, waiting
from kvthaw.cli.options import listed, methods_of

if TYPE_CHECKING:
    from kvthaw.evaluate import perplexity
    from kvthaw.evaluate.cells import Cell, Folder, Stretches
    from kvthaw.evaluate.compare import Goal
    from kvthaw.evaluate.workers import Bench, Failure, Piece, Some, Source

EXAMPLES = (
    "Examples:\n\n"
    "  kvthaw compare --task passkey,niah,longeval,kv-retrieval --methods all --budgets 64,128,256,1024 --out compared\n\n"
    "  kvthaw compare --task passkey --lengths 65536 --methods all --samples 50 --jobs 16 --minutes 8 --out compared\n\n"
    "  kvthaw compare --task ruler --methods icecache,quest,pariskv:beta=0.2 --dense-layers 0,2 --protocol dense,sparse\n\n"
    "  kvthaw compare --report only --out compared\n\n"
    "  kvthaw compare --report only --out benchmarks/results/compare.jsonl"
)


def compare(
    task: Annotated[
        str,
        typer.Option(
            help="Tasks or suites of them, as kvthaw eval knows them, and perplexity (of a fifth of the samples), by commas."
        ),
    ] = "passkey,niah,longeval,kv_retrieval",
    methods: Annotated[
        str, typer.Option(help="[bold]all[/], or methods separated by commas, with options as in icecache:reuse=2.")
    ] = "all",
    budgets: Annotated[str, options.BUDGETS] = "64,128,256,1024",
    lengths: Annotated[str, options.LENGTHS] = "4096",
    samples: Annotated[int, typer.Option(min=1, help="Samples a cell, the same under every method.")] = 50,
    protocol: Annotated[
        str,
        typer.Option(
            help="How the question is processed, separated by commas: [bold]dense[/] prefills it with the context, [bold]sparse[/] "
            "sends it through the method afterwards."
        ),
    ] = "dense",
    dense_layers: Annotated[str, typer.Option(help="First layers that keep all KV, separated by commas.")] = "0",
    probe: Annotated[
        int, typer.Option(min=0, help="Compare every n-th step with exact attention, for recall and mass; 0 never. Slow.")
    ] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the work, each with a model of its own.")] = 1,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Samples that share their decoding steps; 64, or fewer of long prompts, if not given."),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Give up what is unfinished after so long; the same command continues.")
    ] = None,
    report: Annotated[
        str, typer.Option(help="[bold]after[/] the run, [bold]only[/] of what --out holds already, or [bold]never[/].")
    ] = "after",
    seed: options.Seed = 0,
    out: Annotated[
        Path,
        typer.Option(help="Folder for the results, a file a cell, and the report. What stands there is not run again."),
    ] = Path("compared"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print every goal as a JSON object and nothing else on stdout.")
    ] = False,
    model: options.Model = "shipped",
    device: options.Device = None,
    dtype: options.Dtype = "auto",
) -> None:
    """Run every task under every method, budget and length, and report them side by side.

    The report, report.html and report.md in the folder, has tables, differences over the same samples, the goals met and not met,
    heat maps and plots; cells.jsonl there holds all of it, a line a cell. A run that was stopped continues where it was.
    """
    if report not in ("after", "only", "never"):
        raise typer.BadParameter(f"{report!r} is not one of: after, only, never", param_hint="--report")
    from kvthaw.evaluate.job import QUESTIONS

    questions = listed(protocol, str, "--protocol")
    for one in questions:
        if one not in QUESTIONS:
            raise typer.BadParameter(f"{one!r} is not one of: {', '.join(QUESTIONS)}", param_hint="--protocol")
    if report != "never":
        from kvthaw.evaluate.charts import check_drawing

        check_drawing()
    failures: list[Failure] = []
    if report != "only":
        from kvthaw.evaluate.cells import Folder, Stretches
        from kvthaw.evaluate.compare import Grid, units
        from kvthaw.evaluate.perplexity import Course, Reader
        from kvthaw.evaluate.runner import Runner
        from kvthaw.evaluate.tasks import named
        from kvthaw.evaluate.variant import complete
        from kvthaw.evaluate.workers import Bench, Source
        from kvthaw.methods import METHODS

        names = tuple(METHODS) if methods == "all" else tuple(methods_of(methods, "--methods"))
        others = [name for name in listed(task, str, "--task") if name != "perplexity"]
        tasks = named(",".join(others)) if others else []
        grid = Grid(
            tasks=tuple(tasks),
            methods=names,
            budgets=tuple(listed(budgets, budget_of, "--budgets")),
            lengths=tuple(listed(lengths, int, "--lengths")),
            samples=samples,
            questions=tuple(questions),  # type: ignore[arg-type]
            dense_layers=tuple(listed(dense_layers, int, "--dense-layers")),
            seed=seed,
            probe=probe,
        )
        grid.jobs()  # nor do wrong lengths
        end = None if minutes is None else time.monotonic() + 60 * minutes
        course = Course(grid.lengths, samples=max(1, samples // 5), seed=seed)
        kept = Folder(out), Stretches(out)
        llm, tokenizer = load_model(model, device, dtype)
        runner = Runner(llm, tokenizer, kept[0], name=model, batch=batch)
        reader = Reader(llm, tokenizer, name=model, batch=batch)
        with waiting("looking at what is there"):
            stretches = []
            if "perplexity" in listed(task, str, "--task"):
                stretches = reader.missing(course, [complete(llm, variant) for variant in grid.variants()], kept[1].get)
            todo: list[Piece] = list(units(runner, grid, stretches))
        tell_outdated(kept[0].outdated + kept[1].outdated)
        failures = _run(Bench(runner, reader), kept, Source(model, device, dtype, batch), todo, jobs, end)
    if report == "never":
        _gather(out)
    else:
        _report(out, as_json)
    if failures:
        from kvthaw.errors import KvthawError

        each = "\n".join(f"  {failure.unit.name}: {failure.why}" for failure in failures)
        raise KvthawError(f"{len(failures)} pieces of work gave no results; the same command tries them again\n{each}")


def _run(
    bench: Bench, kept: tuple[Folder, Stretches], source: Source, todo: Sequence[Piece], jobs: int, end: float | None
) -> list[Failure]:
    """Compute pieces and keep their lines. Returns those that failed."""
    from kvthaw.evaluate.results import Line
    from kvthaw.evaluate.workers import Failure, work

    failures: list[Failure] = []
    total, done = sum(piece.lines for piece in todo), 0
    if not todo:
        return failures
    with bars() as progress:
        whole = progress.add_task("answers", total=total)
        part = progress.add_task("beginning", total=None)
        given: Iterator[Some | Failure]
        if jobs == 1:
            given = _alone(bench, todo, lambda doing: progress.update(part, description=doing))
        else:
            progress.update(part, description=f"{jobs} processes begin")
            given = work(source, todo, jobs, None if end is None else max(0.0, end - time.monotonic()))
        for lines in given:
            if isinstance(lines, Failure):
                failures.append(lines)
                continue
            kept[0].extend(line for line in lines if isinstance(line, Line))
            kept[1].extend(line for line in lines if not isinstance(line, Line))
            done += len(lines)
            of = lines[0].setting
            progress.update(whole, completed=done)
            progress.update(part, description=f"{of.length:,} {of.method} {of.budget or ''}".strip())
            if end is not None and time.monotonic() >= end:
                break
    if done < total:
        stderr().print(f"{done:,} of {total:,} answers; the same command continues", style="yellow")
    return failures


def _alone(bench: Bench, todo: Sequence[Piece], tell: Callable[[str], None]) -> Iterator[Some]:
    for piece in todo:
        yield from bench.compute(piece, lambda done, of, doing: tell(f"{doing} {done:,}/{of:,}"))


def _gather(out: Path) -> tuple[list[Cell], list[perplexity.Line]]:
    """What a folder or a file of cells holds; that of a folder is written into one file."""
    from kvthaw.evaluate.cells import read_cells, read_stretches, write_cells, write_stretches

    cells, stretches = read_cells(out), read_stretches(out)
    if out.is_dir():
        write_cells(cells, out / "cells.jsonl")
        if stretches:
            write_stretches(stretches, out / "cells.jsonl")
    return cells, stretches


def _report(out: Path, as_json: bool) -> None:
    """Write the report beside the results, and print its goals."""
    from kvthaw.evaluate.compare import hopes
    from kvthaw.evaluate.overview import all_goals, named, overview

    with waiting("writing the report"):
        cells, stretches = _gather(out)
        folder = out if out.is_dir() else out.parent
        stem = "report" if out.is_dir() else out.stem
        document = overview(cells, stretches)
        for suffix, text in ((".html", document.html()), (".md", document.markdown())):
            (folder / f"{stem}{suffix}").write_text(text, encoding="utf-8")
    goals = all_goals(cells)
    if as_json:
        for (question, dense), of in goals.items():
            for goal in of:
                print(json.dumps({"question": question, "dense_layers": dense, **_record(goal)}))
        return
    for protocol, of in goals.items():
        stdout().print(f"{named(protocol)}:")
        for hope in hopes(of):
            least = hope.tightest
            gap = "" if least is None or least.paired is None else f"; least against {least.other}: {least.paired.text}"
            stdout().print(f"  {hope.text}: {hope.verdict}{gap}", soft_wrap=True)
    stderr().print(f"wrote {folder / stem}.html and .md", style="dim")


def _record(goal: Goal) -> dict[str, Any]:
    from dataclasses import asdict

    return {"goal": goal.text, "met": goal.met, **({} if goal.paired is None else asdict(goal.paired))}
