"""Publish a comparison: copy its cells to lab/results/compare.jsonl, write the summary tables of
docs/notes/shipped-model.md, and take docs/compare.png from the report (where Chromium is installed). Claims count those of
compare_seeds.jsonl, too.

usage: python3 -m lab.compared OUT... [REPORT.html]    OUT: a folder of python -m lab compare or eval, or a file of cells

Only what every task and length has under every method is published, so that all numbers are of the same samples; of a cell that
several OUT have, the last. To add methods to what is published: lab/results/compare.jsonl NEW, which may come from another
machine. REPORT.html: only write the report of all tables into this file, of all samples.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lab.cells import Cell, read_cells, read_stretches, records_of, write_cells, write_stretches
from lab.claims import EXACT, Asked, by_budget, by_task, complete, verdicts
from lab.evaluate.compare import summaries
from lab.evaluate.overview import overview
from lab.script import paragraph, put

HERE = Path(__file__).parents[1]
BEGIN = "<!-- written by lab/compared.py -->"
FRESH = 1000
"""Samples from here on were not looked at when methods were designed."""
RESULTS = HERE / "lab" / "results" / "compare.jsonl"
SEEDS = RESULTS.with_name("compare_seeds.jsonl")
"""More samples of some of the cells, for claims that the published ones leave undecided."""


def summary(cells: Sequence[Cell], more: Sequence[Cell] = ()) -> str:
    """Claims, over further seeds too, mean accuracies with and without the exact-string tasks, accuracy by task at 256 tokens."""
    (samples,) = {cell.n for cell in cells}
    seeds = sorted({seed for seed, _ in cells[0].scores})
    tasks, lengths = {cell.task for cell in cells}, sorted({cell.length for cell in cells})
    exact = ", ".join(sorted(tasks.intersection(EXACT)))
    parts = (
        f"{machines(cells)}, bfloat16; seeds {seeds[0]} to {seeds[-1]}, which no method was designed on; {len(tasks)} tasks at "
        f"{' and '.join(f'{length // 1024}k' for length in lengths)}, every method on the same {samples} samples of each.",
        "**Claims**" + (", some over further seeds" if more else ""),
        verdicts(pooled(cells, more)).markdown(),
        "**Mean of all tasks and lengths**",
        by_budget(cells).markdown(),
        f"**Without the exact strings** ({exact}), which none of the four papers asks for",
        by_budget([cell for cell in cells if cell.task not in EXACT]).markdown(),
        f"**By task**, 256 tokens or the rows that are named, percent at {' / '.join(f'{n // 1024}k' for n in lengths)}, "
        f"n = {samples} each; and the tokens that a step attends to on average",
        by_task(cells, 256).markdown(),
    )
    return "\n\n".join(part if part.startswith("|") else paragraph(part) for part in parts)


def machines(cells: Sequence[Cell]) -> str:
    """The machine that most cells come from; others with the rows that are theirs."""
    rows: dict[str, set[str]] = {}
    for cell in cells:
        rows.setdefault(cell.about[3], set()).add(str(Asked(cell.method, cell.budget, cell.retrieved)))
    first, *others = sorted(rows, key=lambda name: -len(rows[name]))
    return first + "".join(f" ({', '.join(sorted(rows[name]))}: {name})" for name in others)


def pooled(cells: Sequence[Cell], more: Sequence[Cell]) -> list[Cell]:
    """The cells, each with the further samples that were asked the same."""
    further = {cell.asked: cell.scores for cell in more}
    return [replace(cell, scores={**further.get(cell.asked, {}), **cell.scores}) for cell in cells]


def newest(paths: Sequence[Path]) -> list[Cell]:
    """Return the cells of several results; of those that ask the same of the same model, the last, whatever the machine."""
    return list({cell.asked: cell for path in paths for cell in read_cells(path)}.values())


PAGES = {"docs/notes/shipped-model.md": summary}  # what stands between the marks of each


def photograph(page: str, to: Path) -> None:
    """The beginning of an HTML page as a picture, by Chromium."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        print(f"no Chromium, so {to} stays as it is", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        path.write_text(page, encoding="utf-8")
        look = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}/user"]
        subprocess.run(
            [browser, *look, "--window-size=1250,1000", f"--screenshot={to}", path.as_uri()], check=True, capture_output=True
        )


def main(arguments: list[str]) -> None:
    """See the module."""
    report = arguments[-1] if arguments and arguments[-1].endswith(".html") else None
    paths = [Path(one) for one in arguments if one != report]
    if not paths or arguments[0].startswith("-"):
        sys.exit(__doc__)
    every = newest(paths)
    stretches = [record for path in paths for record in read_stretches(path)]
    if report is not None:
        Path(report).write_text(overview(summaries([*records_of(every), *stretches])).html(), encoding="utf-8")
        return
    cells = complete([cell for cell in every if cell.question == "dense" and cell.dense_layers == 0])
    if min(seed for cell in cells for seed, _ in cell.scores) < FRESH:
        sys.exit(f"there are samples below {FRESH}, on which methods were designed")
    write_cells(cells, RESULTS)
    if stretches:
        write_stretches(stretches, RESULTS)
    for page, text in PAGES.items():
        put(HERE / page, text(cells, read_cells(SEEDS)), BEGIN)
    most = Counter(cell.about for cell in cells).most_common(1)[0][0]  # a report is of one machine
    photograph(
        overview(summaries(records_of(cell for cell in cells if cell.about == most))).html(), HERE / "docs" / "compare.png"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
