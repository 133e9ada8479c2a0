"""Write the table of all methods and the list of differences from their papers into docs/methods.md."""

from __future__ import annotations

import textwrap
from pathlib import Path

from kvthaw.evaluate.describe import describe, word
from kvthaw.methods import METHODS, resolve
from lab.script import put

PAGE = Path(__file__).parents[1] / "docs" / "methods.md"
BEGIN = "<!-- written by lab/methods_table.py -->"


def markdown() -> str:
    """Return the table in Markdown, and below it a line for each method that differs from its paper."""
    rows = [describe(resolve(name)) for name in METHODS]
    differ = {row["name"]: row.pop("differs_from_the_paper_in") for row in rows}
    lines = ["| " + " | ".join(column.replace("_", " ") for column in rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(word(value) for value in row.values()) + " |" for row in rows]
    items = [f"- `{name}`: {said}." for name, said in differ.items() if said != "-"]
    wrapped = [textwrap.fill(item, 132, subsequent_indent="  ", break_on_hyphens=False) for item in items]
    return "\n".join([*lines, "", "Each differs from its paper in:", "", *wrapped])


if __name__ == "__main__":
    put(PAGE, markdown(), BEGIN)
