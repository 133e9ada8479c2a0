"""Publish a comparison: copy its cells to benchmarks/results/compare*.jsonl, write the summary tables of
docs/results.md, and take docs/compare.png from the report (where Chromium is installed).

usage: python3 -m benchmarks.compared OUT [REPORT]    OUT: the folder of kvthaw compare, or a file of its cells

Samples from 1000 on are fresh and go to compare_fresh.jsonl. REPORT: only write the report of all tables into this HTML file.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cells import Cell, read_cells, read_stretches, records_of, write_cells, write_stretches
from benchmarks.claims import EXACT, by_budget, complete, protocols, under, verdicts
from kvthaw.evaluate.compare import summaries
from kvthaw.evaluate.overview import overview

HERE = Path(__file__).parents[1]
BEGIN, END = "<!-- written by benchmarks/compared.py -->", "<!-- until here -->"


FRESH = 1000
"""Samples from here on were not looked at when methods were designed."""
RESULTS = HERE / "benchmarks" / "results"


def summary(cells: Sequence[Cell]) -> str:
    """Claims and mean accuracies on fresh seeds, with and without the exact-string tasks, then those of the large comparison."""
    fresh = complete(read_cells(RESULTS / "compare_fresh.jsonl"))
    asked = {(cell.task, cell.length): cell.n for cell in fresh}
    words = ", ".join(f"{task} at {length // 1024}k" for task, length in asked)
    others = [cell for cell in fresh if cell.task not in EXACT]
    return "\n\n".join(
        (
            f"**Fresh seeds** (from 1000 on; no design looked at them; {fresh[0].about[3]}; every method has the same "
            f"{max(asked.values())} samples of {words}):",
            verdicts(fresh).markdown(),
            by_budget(fresh).markdown(),
            f"Without {', '.join(sorted({cell.task for cell in fresh} & set(EXACT)))}:",
            by_budget(others).markdown(),
            f"**The large comparison** (seeds 0 to 49, which our methods were designed on; {cells[0].about[3]}; 4k to 32k):",
            by_budget(under(cells, protocols(cells)[0])).markdown(),
        )
    )


PAGES = {"docs/results.md": summary}  # what stands between the marks of each


def put(path: Path, text: str) -> None:
    """Replace what stands between the marks of a file. Ends the script where it has none."""
    whole = path.read_text(encoding="utf-8")
    before, begin, rest = whole.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        sys.exit(f"{path} has no {BEGIN} followed by {END}")
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


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
            [browser, *look, "--window-size=1250,1700", f"--screenshot={to}", path.as_uri()], check=True, capture_output=True
        )


def main(arguments: list[str]) -> None:
    """See the module."""
    if len(arguments) not in (1, 2) or arguments[0].startswith("-"):
        sys.exit(__doc__)
    cells, stretches = read_cells(Path(arguments[0])), read_stretches(Path(arguments[0]))
    report = overview(*summaries([*records_of(cells), *stretches])).html()
    if len(arguments) == 2:
        Path(arguments[1]).write_text(report, encoding="utf-8")
        return
    results = RESULTS / ("compare_fresh.jsonl" if min(seed for seed, _ in cells[0].scores) >= FRESH else "compare.jsonl")
    write_cells(cells, results)
    if stretches:
        write_stretches(stretches, results)
    for page, text in PAGES.items():
        put(HERE / page, text(read_cells(RESULTS / "compare.jsonl")))
    if results.stem == "compare_fresh":
        return
    photograph(report, HERE / "docs" / "compare.png")


if __name__ == "__main__":
    main(sys.argv[1:])
