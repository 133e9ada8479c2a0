"""Markdown tables of what python -m lab eval printed with --json: tasks, recall, drift, shares.

usage: tables.py FILE...            tables of JSON lines
       tables.py --gather COMMIT    the lines of stdin, shortened and marked, for lab/results
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lab.evaluate.document import Table

Line = dict[str, Any]


def kind(line: Line) -> str:
    """What a line is of: task, drift or recall."""
    return str(line.get("eval", "task"))


def gather(lines: Iterable[Line], commit: str) -> Iterable[Line]:
    """Lines marked with commit and kind, without what is told of single heads, and of parts of the steps where they are few."""
    for line in lines:
        of = kind(line)
        short = {name: value for name, value in line.items() if name != "bins" or of == "drift"}
        if "layers" in short:
            short["layers"] = [{k: v for k, v in layer.items() if k != "heads"} for layer in short["layers"]]
        yield short | {"commit": commit}


def share(value: float | None) -> str:
    """Three decimals below 1, otherwise two."""
    return "" if value is None else f"{value:.3f}" if value < 1 else f"{value:.2f}"


def asked(line: Line) -> str:
    """A method as it was asked for, with its budget."""
    dense = f", {line['dense_layers']} dense" if line.get("dense_layers") else ""
    rows = line.get("retrieved")
    limit = (
        ""
        if line["budget"] is None and rows is None
        else f", {rows:g} rows"
        if line["budget"] is None
        else f", {line['budget']}"
    )
    return f"{line['method']}{limit}{dense}"


def grouped(lines: Iterable[Line], name: Callable[[Line], Any]) -> dict[Any, list[Line]]:
    """Lines by a name, in their order."""
    found: dict[Any, list[Line]] = {}
    for line in lines:
        found.setdefault(name(line), []).append(line)
    return found


def tasks(lines: list[Line]) -> Iterable[str]:
    """Accuracy of every method: a table a task, lengths across, how many samples behind."""
    for task, of in grouped(lines, lambda line: line["task"]).items():
        lengths = sorted({line["length"] for line in of})
        rows = []
        for method, runs in grouped(of, asked).items():
            cells = {line["length"]: f"{100 * line['accuracy']:.0f} % ({line['n']})" for line in runs}
            rows.append([method, *(cells.get(length, "") for length in lengths)])
        yield f"**{task}**\n\n" + Table(["", *(f"{length:,}" for length in lengths)], rows).markdown()


MEASURES = {
    "recall_at_rows": "recall of the exact rows",
    "ceiling": "ceiling",
    "mass_of_exact": "mass of exact",
    "retrieved_of_exact": "without sink and window",
    "output_error": "output error",
}


def recall(lines: list[Line]) -> Iterable[str]:
    """A table a length: every method, its means."""
    for (length, steps), of in grouped(lines, lambda line: (line["length"], line["steps"])).items():
        kinds = ", ".join(f"{name}: {part['observed']}" for name, part in of[0]["kinds"].items())
        rows = [[asked(line), *(share(line[name]) for name in MEASURES)] for line in of]
        yield (
            f"**{length:,} tokens**, {of[0]['samples']} prompts, {steps} steps (observed: {kinds})\n\n"
            + Table(["", *MEASURES.values()], rows).markdown()
        )


def drift(lines: list[Line]) -> Iterable[str]:
    """Two tables a number of steps: recall by quarters, ceiling in brackets, and the change; and attention mass."""
    for (length, steps), of in grouped(lines, lambda line: (line["length"], line["steps"])).items():
        rows = []
        for line in of:
            parts = [(part["recall_at_rows"], part["ceiling"]) for part in line["quarters"]]
            cells = [share(a) + (f" ({share(b)})" if b is not None else "") for a, b in parts]
            change = f"{100 * (parts[-1][0] - parts[0][0]):+.1f}" if parts else ""
            rows.append([asked(line), *cells, change, share(line["mass_of_exact"])])
        yield (
            f"**{steps:,} tokens after {length:,}**, {of[0]['samples']} texts\n\n"
            + Table(["", "first quarter", "second", "third", "last", "change", "mass of exact"], rows).markdown()
        )
        masses = [[asked(line), *(share(part["attention_mass"]) for part in line["quarters"])] for line in of]
        yield "Attention mass:\n\n" + Table(["", "first quarter", "second", "third", "last"], masses).markdown()


def shares(lines: list[Line]) -> Iterable[str]:
    """PRKV's automatic share, lengths across."""
    for (page, window, samples), of in grouped(lines, lambda line: (line["page"], line["window"], line["samples"])).items():
        lengths, cells = sorted({line["length"] for line in of}), {(line["length"], line["rows"]): line for line in of}
        rows = [
            [f"{k:,} rows", *(share(cells[length, k]["share"]) if (length, k) in cells else "" for length in lengths)]
            for k in sorted({line["rows"] for line in of})
        ]
        yield (
            f"**automatic static share**, pages of {page}, window {window}, {samples} prompts\n\n"
            + Table(["", *(f"{length:,}" for length in lengths)], rows).markdown()
        )


def main(arguments: list[str]) -> None:
    """See the module."""
    if len(arguments) == 2 and arguments[0] == "--gather":
        for line in gather(map(json.loads, filter(str.strip, sys.stdin)), arguments[1]):
            print(json.dumps(line))
        return
    if not arguments or arguments[0].startswith("-"):
        sys.exit(__doc__)
    lines = [json.loads(text) for name in arguments for text in Path(name).read_text().splitlines()]
    by_kind = grouped(lines, kind)
    makers = {"task": tasks, "recall": recall, "drift": drift, "shares": shares}
    parts = [part for of, make in makers.items() for part in make(by_kind.get(of, []))]
    print("\n\n".join(parts))


if __name__ == "__main__":
    main(sys.argv[1:])
