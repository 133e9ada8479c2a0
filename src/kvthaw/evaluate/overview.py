"""The report of a comparison, from its summaries: tables first, then plots."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from rich.table import Table as RichTable

from kvthaw.engine.hub import display_name
from kvthaw.evaluate import plot
from kvthaw.evaluate.compare import named
from kvthaw.evaluate.document import Document, Part, Share, Table, Value, fold, heading, paragraph, picture
from kvthaw.evaluate.metrics import mean, paired_sums, wilson
from kvthaw.evaluate.report import lay_out, milliseconds, on

Summary = dict[str, Any]
Row = tuple[str, ...]


def by_task(summaries: Sequence[Summary]) -> list[RichTable]:
    """Return accuracy for the terminal, a table a length: one row a method and budget, one column a task."""
    first, every = summaries[0], dict.fromkeys(one["n"] for one in summaries)
    samples = f"{' / '.join(map(str, every))} sample{'s' * (max(every) > 1)}"
    about = f"{samples} a cell, question {first['question']}, {on(first)}"
    by_length: dict[int, list[Summary]] = {}
    for one in summaries:
        by_length.setdefault(one["length"], []).append(one)
    return [in_text(f"accuracy at {n:,} tokens, {about}", accuracies(by_length[n])) for n in sorted(by_length)]


def perplexities(summaries: Sequence[Summary]) -> RichTable:
    """Return perplexity by position for the terminal, one row a variant."""
    first = summaries[0]
    places = f"{first['n']} place" + "s" * (first["n"] > 1)
    about = f"{first['steps']} tokens each, {places} in the text, {on(first)}"
    return in_text(f"perplexity after so many tokens, and nats over full: {about}", perplexity_table(summaries))


def in_text(title: str, made: Table) -> RichTable:
    """Return a table for the terminal, shares without their intervals."""
    cells = [[value if isinstance(value, str) else value.text for value in row] for row in made.rows]
    return lay_out(title, [textwrap.fill(name, 10, break_long_words=False) for name in made.columns], cells)


def overview(tasks: Sequence[Summary], perplexities: Sequence[Summary] = ()) -> Document:
    """Make the report of `kvthaw.evaluate.compare.summaries`."""
    blocks: list[Part] = []
    for question in dict.fromkeys(one["question"] for one in tasks):
        some = [one for one in tasks if one["question"] == question]
        how = "in the prefill" if question == "dense" else "through the method"
        counts = sorted({one["n"] for one in some})
        samples = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
        about = (
            f"Model {display_name(some[0]['model'])} ({some[0]['weights']}) in {some[0]['dtype']} on {some[0]['device']}; "
            f"{samples} samples a cell, the same under every method. A budget is the most tokens that attention reads per KV head "
            "and step. Percent with 95 % intervals: Wilson's of an accuracy, Agresti and Min's of the paired difference to full "
            "attention."
        )
        rows = max(one["rows"] for one in some) if any(one["step_s"] for one in some) else 1
        if rows > 1:
            about += f" A decode step is shared by up to {rows} samples."
        blocks += [heading(f"Accuracy, the question {how}"), paragraph(about), accuracies(some).part()]
        for length in sorted({one["length"] for one in some}):
            at = [one for one in some if one["length"] == length]
            blocks.append(fold(f"At {length:,} tokens", accuracies(at).part()))
        blocks += _pictures(some)
    if perplexities:
        blocks += [heading("Perplexity"), paragraph(_PERPLEXITY), perplexity_table(perplexities).part()]
    return Document("Methods on the same work", blocks)


_PERPLEXITY = (
    "Of the tokens that follow in the text, sent one by one through the method; beside it the difference to full attention on the "
    "same tokens in nats, with its normal 95 % interval."
)


def accuracies(some: Sequence[Summary]) -> Table:
    """One row a method and budget, the best mean first; one column a task."""
    tasks = list(dict.fromkeys(one["task"] for one in some))
    rows: dict[Row, list[Summary]] = {}
    for one in some:
        rows.setdefault(tuple(named(one)), []).append(one)
    lines = []
    for variant, mine in sorted(rows.items(), key=lambda row: (row[0][0] != "full", -_mean(row[1]), row[0])):
        by_task = {task: [one for one in mine if one["task"] == task] for task in tasks}
        held = [one["attended_mean"] for one in mine if one["attended_mean"] is not None]
        lines.append(
            [
                *variant,
                _share(mine),
                _difference(mine),
                *(_share(of) for of in by_task.values()),
                f"{sum(held) / len(held):.0f}" if held else "all",
                milliseconds(mean(one["step_s"] for one in mine)),
                f"{max(one['kv_device_bytes'] + one['kv_dense_bytes'] for one in mine) / 2**20:.2f}",
            ]
        )
    heads = (
        "method",
        "budget",
        "dense layers",
        "mean",
        "less full",
        *tasks,
        "tokens attended",
        "ms a step",
        "KV MiB on the device",
    )
    return Table(heads, lines)


def _mean(some: Sequence[Summary]) -> float:
    return float(sum(one["accuracy"] * one["n"] for one in some) / sum(one["n"] for one in some))


def _share(some: Sequence[Summary]) -> Value:
    n = sum(one["n"] for one in some)
    return Share(_mean(some), *wilson(_mean(some), n), n) if some else "-"


def _difference(some: Sequence[Summary]) -> Value:
    """To full attention; cells that share no sample with it have none."""
    n, total, squares = (sum(column) for column in zip(*(one["paired"] for one in some), strict=True))
    return "-" if n == 0 or some[0]["method"] == "full" else Share(*paired_sums(n, total, squares), n, signed=True)


def _pictures(some: Sequence[Summary]) -> list[Part]:
    if all(one["method"] == "full" for one in some):
        return []
    return [heading("Plots", 3), picture(plot.svg(plot.by_budget(some)), "Accuracy by budget, all tasks and lengths.")]


def perplexity_table(some: Sequence[Summary]) -> Table:
    lengths = sorted({one["length"] for one in some})
    rows: dict[Row, dict[int, Summary]] = {}
    for one in some:
        rows.setdefault(tuple(named(one)), {})[one["length"]] = one
    lines: list[list[Value]] = []
    for variant, found in sorted(rows.items(), key=lambda row: sum(one["nll"] for one in row[1].values())):
        cells = [_nats(found.get(length)) for length in lengths]
        lines.append([*variant, *cells])
    return Table(("method", "budget", "dense layers", *(f"after {length:,}" for length in lengths)), lines)


def _nats(one: Summary | None) -> str:
    if one is None:
        return "-"
    apart = ""
    if one["method"] != "full" and one["difference"] is not None:
        apart = f", {one['difference']:+.3f} nats ({one['difference_95'][0]:+.3f} to {one['difference_95'][1]:+.3f})"
    return f"{one['perplexity']:.2f}{apart}, n={one['n']}"
