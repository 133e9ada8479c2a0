"""python -m lab reproduce: the papers' tables and figures."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvthaw.cli import options
from kvthaw.cli.common import print_results, tell_outdated, warned
from kvthaw.cli.options import ModelOptions, host_bytes_of, words
from kvthaw.cli.progress import bars, say
from lab.cli import options as own
from lab.cli.options import save_plot

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

    from kvthaw.evaluate.evaluator import Progress as State
    from lab.reproduce import Experiment, Outcome

EXAMPLES = (
    "Examples:\n\n  python -m lab reproduce list\n\n  python -m lab reproduce clusterkv-f11 --quick\n\n"
    "  python -m lab reproduce icecache-t1 --model meta-llama/Llama-3.1-8B-Instruct --data LongBench/data --out icecache.jsonl "
    "--plot icecache-t1.png\n\n"
    "  python -m lab reproduce icecache-f7,clusterkv-f12,prkv-f7 --out speed.jsonl --plot pictures   (a GPU; no weights)"
)


def reproduce(
    name: Annotated[
        str,
        typer.Argument(help="[bold]list[/]; or names from the list, names of papers, or [bold]all[/], separated by commas."),
    ],
    model: Annotated[str | None, options.MODEL] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Run it in seconds on the shipped model. This shows that it works; the numbers are not comparable."
        ),
    ] = False,
    data: Annotated[
        str | None, typer.Option(help="Published data: a file, a folder, or [bold]hub[/] to download it.", metavar="PATH")
    ] = None,
    text: own.LongText = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Run only this number of questions or samples, from the first on.")
    ] = None,
    host_memory: options.HostMemory = None,
    as_json: options.Lines = False,
    out: options.Out = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the result in the paper's form: a PNG file, or a folder for several names.")
    ] = None,
    device: options.Device = None,
    dtype: options.Dtype = "auto",
) -> None:
    """Measure a table or figure of a paper at the paper's settings, and print the paper's numbers next to ours."""
    from kvthaw.errors import ConfigError, KvthawError
    from kvthaw.evaluate.results import ResultsFile
    from lab.evaluate.plot import check, save
    from lab.reproduce import PAPERS, Lab, named, run
    from lab.reproduce import check as check_data
    from lab.reproduce.draw import picture

    if name == "list":
        every = [one for each in PAPERS.values() for one in each]
        print_results(map(_listed, every), as_json, lambda: [_list(every)])
        return
    wanted = list(named(name))
    if plot is not None and (plot.is_dir() or len(wanted) > 1 or not plot.suffix):
        plot.mkdir(parents=True, exist_ok=True)
    pictures = {one.name: plot / f"{one.name}.png" if plot is not None and plot.is_dir() else plot for one in wanted}
    for path in pictures.values():
        check(path)
    chosen = model or ("shipped" if quick else None)
    results = ResultsFile(out)
    outcomes: list[Outcome] = []
    failures: dict[str, list[str]] = {}
    try:
        with bars() as progress:
            room = host_bytes_of(host_memory)
            lab = Lab(
                chosen, lambda asked: ModelOptions(asked, device, dtype).load(), results, data, words(text), quick, limit, room
            )
            check_data(wanted, lab)
            bar = progress.add_task("", total=None, line="end")
            for one in wanted:
                lab.tell, lab.note = partial(_tell, progress, bar, one.name), partial(_note, one.name)
                try:
                    outcomes.append(run(one, lab))
                except KvthawError as error:
                    failures.setdefault(str(error), []).append(one.name)
    finally:
        tell_outdated(results.outdated)
        for outcome in outcomes:
            save_plot(pictures[outcome.experiment.name], lambda path, of=outcome: save(picture(of), path))  # type: ignore[misc]
        if outcomes:
            _print(outcomes, as_json)
    if failures:
        raise ConfigError("; ".join(f"{', '.join(names)}: {error}" for error, names in failures.items()))


def _print(outcomes: list[Outcome], as_json: bool) -> None:
    print_results(
        [line for each in outcomes for line in each.lines()],
        as_json,
        lambda: [one for each in outcomes for one in tables(each)],
    )
    for outcome in outcomes:
        if outcome.experiment.note and not as_json:
            say(f"{outcome.experiment.name}: {outcome.experiment.note}")


def _note(name: str, text: str) -> None:
    warned(f"{name}: {text}")


def _tell(bar: Progress, task: Any, name: str, state: State) -> None:
    tokens = f", token {state.tokens:,} of {state.prompt:,}" if state.prompt else ""
    bar.update(task, description=f"{name}: {state.doing}{tokens}", completed=state.samples, total=state.of)


def _listed(one: Experiment) -> dict[str, object]:
    return {
        "name": one.name,
        "source": one.source,
        "title": one.title,
        "paper_on": list(one.says),
        "needs": one.plan.needs,
        "minutes": one.minutes,
    }


def _list(every: list[Experiment]) -> Table:
    from kvthaw.evaluate.report import lay_out

    title = "Minutes are a rough estimate for one H100. With --quick a name needs nothing else and takes seconds."
    columns = ("name", "what", "the paper's model or machine", "needs", "minutes")
    rows = [(one.name, one.title, "; ".join(one.says), one.plan.needs, f"{one.minutes:,.0f}") for one in every]
    return lay_out(title, columns, rows, words=columns[:-1], folded=columns[1:-1])


def tables(outcome: Outcome) -> tuple[Table, Table]:
    """Return the paper's numbers above ours, and what each row of ours was measured on."""
    from kvthaw.evaluate.report import lay_out
    from lab.reproduce.draw import shown

    one, columns, rows = outcome.experiment, outcome.said.columns, []
    for row, said in outcome.said.rows.items():
        ours = {column: cell.value for (name, column), cell in outcome.cells.items() if name == row}
        rows.append([row, "paper", *(shown(said[column]) for column in columns)])
        rows.append(["", "ours", *(shown(ours.get(column)) for column in columns)])
    title = f"{one.name}: {one.title}; {one.source}; {one.unit}; the paper on {outcome.model}"
    measured = [(f"{row}: {outcome.on(row)}",) for row in outcome.said.rows]
    return lay_out(title, ("", "", *columns), rows), lay_out(
        None, ("ours on",), measured, words=("ours on",), folded=("ours on",)
    )
