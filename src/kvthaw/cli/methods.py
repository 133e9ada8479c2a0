"""kvthaw methods: what there is."""

from __future__ import annotations

import json

from kvthaw.cli import options
from kvthaw.cli.common import print_wide

EXAMPLES = "Examples:\n\n  kvthaw methods\n\n  kvthaw methods --json"


def methods(as_json: options.Json = False) -> None:
    """List the methods, and what each does with the KV.

    paper: where from; unit: what it selects; kv: dense, offloaded or evicted; decides: where; graph safe: whether its steps can be
    captured; bytes a key: what its index keeps on the device, of a key of head_dim 128 in bf16.
    """
    from kvthaw.evaluate.describe import describe, word
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
        table.add_row(*(word(value) for value in row.values()))
    print_wide(table)
