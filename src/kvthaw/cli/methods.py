"""kvthaw methods: what there is."""

from __future__ import annotations

import json
from typing import Any

from kvthaw.cli.common import JsonOption, print_wide

EXAMPLES = "Examples:\n\n  kvthaw methods\n\n  kvthaw methods --json"


def methods(as_json: JsonOption = False) -> None:
    """List the methods: where from, what they select, what they do with the KV, where they decide."""
    from kvthaw.evaluate.describe import describe
    from kvthaw.methods import METHODS, resolve

    rows = [describe(resolve(name)) for name in METHODS]
    if as_json:
        print(json.dumps(rows))
        return
    from rich.table import Table

    table = Table(title="Methods")
    for column in rows[0]:
        table.add_column(column.replace("_", " "))
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    print_wide(table)


def _cell(value: Any) -> str:
    return {True: "yes", False: "no", None: "-"}.get(value, str(value))
