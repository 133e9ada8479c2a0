"""Write the paper's numbers beside those of benchmarks/results/reproduce.jsonl into docs/reproduce.md, and IceCache's figure 1.

usage: python3 -m benchmarks.reproduced [OUT]    OUT: a file that kvthaw reproduce --out wrote, which is added first
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.compared import HERE
from benchmarks.script import put
from kvthaw.errors import ConfigError
from kvthaw.evaluate.document import Table
from kvthaw.evaluate.results import ResultsFile
from kvthaw.reproduce import EXPERIMENTS, Lab, Outcome, run
from kvthaw.reproduce.draw import picture, shown

BEGIN = "<!-- written by benchmarks/reproduced.py -->"
DEVICE = "NVIDIA H200"
FILE = HERE / "benchmarks" / "results" / "reproduce.jsonl"


def unloaded(name: str) -> tuple[object, object]:
    """Stand for a loader where no model may be needed."""
    raise ConfigError(f"{name} is not loaded")


def lab() -> Lab:
    """Return the results, nothing of which is measured again."""
    return Lab(None, unloaded, ResultsFile(FILE), known=DEVICE)


def pages() -> str:
    """Return the tables of all names of which something was timed, the paper's number before ours."""
    made = []
    for one in EXPERIMENTS.values():
        if one.plan.needs == "a GPU":
            try:
                made.append(page(run(one, lab())))
            except ConfigError:  # nothing of it was measured
                continue
    return "\n\n".join(made) or "No times yet."


def page(outcome: Outcome) -> str:
    """Return the table of an outcome; columns and rows without a number of ours are left out, and eager steps marked."""
    one, columns = outcome.experiment, [c for c in outcome.said.columns if any(c == of for _, of in outcome.cells)]
    rows = []
    for row, said in outcome.said.rows.items():
        ours = [outcome.cells.get((row, column)) for column in columns]
        if any(ours):
            each = zip(columns, ours, strict=True)
            eager = ", eager" * all(", eager" in cell.on for cell in ours if cell)
            rows.append([f"`{row}`{eager}", *(f"{shown(said[c])} / {shown(cell.value) if cell else '-'}" for c, cell in each)])
    head = f"**{one.name}**: {one.title}. {one.source}; {one.unit}. The paper's on {outcome.model}"
    return f"{head}{'; ' * bool(one.note)}{one.note}.\n\n" + Table(("paper / here", *columns), rows).markdown()


def main(arguments: list[str]) -> None:
    """See the module."""
    if arguments:
        ResultsFile(FILE).add(*ResultsFile(Path(arguments[0])))
    put(HERE / "docs" / "reproduce.md", pages(), BEGIN)
    picture(run(EXPERIMENTS["icecache-f1"], lab())).savefig(HERE / "docs" / "figures" / "icecache-f1.png", dpi=100)


if __name__ == "__main__":
    main(sys.argv[1:])
