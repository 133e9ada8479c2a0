"""Write the paper's numbers beside ours, of lab/results, into docs/reproduce.md; draw IceCache's figures 1 and 8.

usage: python3 -m lab.reproduced [OUT]    OUT: a file that python -m lab reproduce --out wrote, which is added first
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from kvthaw.errors import ConfigError
from kvthaw.evaluate.results import ResultsFile
from lab.compared import HERE
from lab.evaluate.document import Table
from lab.reproduce import EXPERIMENTS, Lab, Outcome, run
from lab.reproduce.draw import picture, shown
from lab.reproduce.experiment import Cell, Cells
from lab.script import paragraph, put

BEGIN = "<!-- written by lab/reproduced.py -->"
DEVICE = "NVIDIA H200"
FILE = HERE / "lab" / "results" / "reproduce.jsonl"


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
    return "\n\n".join([*made, page(far())])


def far() -> Outcome:
    """IceCache's figure 8, of some of the model's layers over drawn keys: prompts of 300k take minutes."""
    one = EXPERIMENTS["icecache-f8"]
    cells: Cells = {}
    for line in map(json.loads, (FILE.parent / "trees.jsonl").read_text().splitlines()):
        asked = line.get("setting", {})
        if asked.get("prompt") == "filled" and asked["shape"] == "qwen3-4b":
            limit = "" if asked["budget"] is None else f":budget={asked['budget']}"
            on = f"{asked['layers']} of 36 layers, drawn keys, {asked['device']}, {asked['steps']}"
            cells[asked["method"] + limit, f"{asked['length'] // 1000}k"] = Cell(line["tpot_s"], on)
    model, said = one.said(None)
    note = f"{one.note}; here {next(iter(cells.values())).on.partition(',')[0]}, 2 of them dense, over drawn keys"
    return Outcome(replace(one, note=note), model, said, cells, "another machine than the paper's")


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
    return paragraph(f"{head}{'; ' * bool(one.note)}{one.note}.") + "\n\n" + Table(("paper / here", *columns), rows).markdown()


def main(arguments: list[str]) -> None:
    """See the module."""
    if arguments:
        ResultsFile(FILE).add(*ResultsFile(Path(arguments[0])))
    put(HERE / "docs" / "reproduce.md", pages(), BEGIN)
    for outcome in (run(EXPERIMENTS["icecache-f1"], lab()), far()):
        picture(outcome).savefig(HERE / "docs" / "figures" / f"{outcome.experiment.name}.png", dpi=100)


if __name__ == "__main__":
    main(sys.argv[1:])
