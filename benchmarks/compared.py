"""Publish a comparison: copy its cells to benchmarks/results/compare*.jsonl, write the summary tables of
docs/results.md, and take docs/compare.png from the report (where Chromium is installed).

usage: python3 -m benchmarks.compared OUT [REPORT]    OUT: the folder of kvthaw compare, or a file of its cells

REPORT: only write the report of all tables into this HTML file.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cells import Cell, read_cells, read_stretches, records_of, write_cells, write_stretches
from benchmarks.claims import EXACT, by_budget, protocols, under, verdicts
from kvthaw.evaluate.compare import summaries
from kvthaw.evaluate.overview import overview

HERE = Path(__file__).parents[1]
BEGIN, END = "<!-- written by benchmarks/compared.py -->", "<!-- until here -->"


def summary(cells: Sequence[Cell]) -> str:
    """Claims and mean accuracies of the first protocol, with and without the exact-string tasks, as Markdown."""
    some = under(cells, protocols(cells)[0])
    others = [cell for cell in some if cell.task not in EXACT]
    return "\n\n".join(
        (
            verdicts(some).markdown(),
            "All tasks:",
            by_budget(some).markdown(),
            f"Without {', '.join(EXACT)}:",
            by_budget(others).markdown(),
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
    results = HERE / "benchmarks" / "results" / "compare.jsonl"
    write_cells(cells, results)
    if stretches:
        write_stretches(stretches, results)
    for page, text in PAGES.items():
        put(HERE / page, text(cells))
    photograph(report, HERE / "docs" / "compare.png")


if __name__ == "__main__":
    main(sys.argv[1:])
