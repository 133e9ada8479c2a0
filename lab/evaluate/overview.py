"""The report of a comparison, from its summaries: tables first, then plots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table as RichTable

from kvthaw.engine.hub import display_name
from kvthaw.evaluate.report import (
    AGREEMENT,
    KL,
    Cell,
    agreement_rows,
    by_column,
    compared,
    enough,
    named,
    narrow,
    on,
    value,
)
from kvthaw.evaluate.results import mean
from kvthaw.formatting import counted
from lab.evaluate import plot
from lab.evaluate.compare import Summaries
from lab.evaluate.document import Document, Part, Share, Table, Value, fold, heading, paragraph, picture
from lab.evaluate.metrics import paired_sums, wilson
from lab.evaluate.tables import milliseconds, percent

Summary = dict[str, Any]
Row = tuple[str, ...]


def by_task(summaries: Sequence[Summary], near: Mapping[Row, float] | None = None) -> list[RichTable]:
    """Return accuracy for the terminal, a table a length: one row a method and budget, one column a task.

    near: as for `accuracies`.
    """
    first, every = summaries[0], dict.fromkeys(one["n"] for one in summaries)
    samples = f"{' / '.join(map(str, every))} sample{'s' * (max(every) > 1)}"
    about = f"{samples} a cell, question {first['question']}, {on(first)}"
    by_length: dict[int, list[Summary]] = {}
    for one in summaries:
        by_length.setdefault(one["length"], []).append(one)
    return [_in_text(f"accuracy at {n:,} tokens, {about}", accuracies(by_length[n], near)) for n in sorted(by_length)]


def perplexities(summaries: Sequence[Summary]) -> RichTable:
    """Return perplexity by position for the terminal, one row per length and variant."""
    first = summaries[0]
    places = counted(first["n"], "place")
    name = {id(one): named(one) for one in summaries}
    columns: dict[str, Cell] = {
        "tokens": value("length", "{:,}"),
        "method": value("method"),
        "budget": lambda one: str(name[id(one)][1]),
        "dense layers": lambda one: str(name[id(one)][2]),
        "perplexity": value("perplexity", "{:.2f}"),
        "nats\nover full": lambda one: _over(one, "difference"),
        "95 %": lambda one: _over(one, "difference_95"),
    }
    title = f"perplexity of {first['steps']} tokens after so many, {places} in the text, {on(first)}"
    sparse = [row for row in name.values() if row[0] != "full"]
    for column, place in (("budget", 1), ("dense layers", 2)):
        if len({row[place] for row in sparse}) == 1:  # the title has it
            del columns[column]
            title += f", {column} {sparse[0][place]}"
    rows = sorted(summaries, key=lambda one: (one["length"], one["method"] != "full", one["nll"]))
    return by_column(title, rows, columns, sections="length")


def _over(one: Summary, field: str) -> str:
    """Return the nats that a variant has more than full attention, or their interval; "-" of full attention itself."""
    found = one[field]
    if one["method"] == "full" or found is None:
        return "-"
    return f"{found:+.3f}" if field == "difference" else f"{found[0]:+.3f} to {found[1]:+.3f}"


def _in_text(title: str, made: Table) -> RichTable:
    """Return a table for the terminal, shares without their intervals."""
    return narrow(title, made.columns, [[each if isinstance(each, str) else each.text for each in row] for row in made.rows])


def nearness(agreements: Iterable[Summary]) -> dict[Row, float]:
    """Return the KL to full attention of each variant, as a table names it."""
    return {tuple(named(one)): one["kl"] for one in agreements}


def overview(summaries: Summaries) -> Document:
    """Make the report of `lab.evaluate.compare.summaries`."""
    blocks: list[Part] = []
    near = nearness(summaries.agreements)
    for question in dict.fromkeys(one["question"] for one in summaries.tasks):
        some = [one for one in summaries.tasks if one["question"] == question]
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
        blocks += [heading(f"Accuracy, the question {how}"), paragraph(about), accuracies(some, near).part()]
        for length in sorted({one["length"] for one in some}):
            at = [one for one in some if one["length"] == length]
            blocks.append(fold(f"At {length:,} tokens", accuracies(at).part()))
        blocks += _pictures(some)
    for question in dict.fromkeys(one["question"] for one in summaries.benchmarks):
        some = [one for one in summaries.benchmarks if one["question"] == question]
        how = "in the prefill" if question == "dense" else "through the method"
        blocks += [
            heading(f"Published benchmarks, the question {how}"),
            paragraph(_SCORES + on(some[0])),
            score_table(some, near).part(),
        ]
    if summaries.agreements:
        about = f"{_AGREEMENT} {compared(summaries.agreements[0])}, {on(summaries.agreements[0])}."
        blocks += [
            heading("Agreement with full attention"),
            paragraph(about),
            Table(AGREEMENT, agreement_rows(summaries.agreements)).part(),
        ]
        blocks += [paragraph(said) for said in [enough(summaries.agreements)] if said]
    if summaries.perplexities:
        blocks += [heading("Perplexity"), paragraph(_PERPLEXITY), perplexity_table(summaries.perplexities).part()]
    return Document("python -m lab compare: methods side by side", blocks)


_SCORES = "Scores by the benchmarks' own metrics, in percent. "
_AGREEMENT = (
    "Every method is sent the tokens that full attention answers. KL(full || method) of the next-token distributions in nats a "
    "token, with a bootstrap interval over prompts, and the share of tokens whose likeliest next token is the same:"
)
_PERPLEXITY = (
    "Of the tokens that follow in the text, sent one by one through the method; beside it the difference to full attention on the "
    "same tokens in nats, with its normal 95 % interval."
)


def accuracies(some: Sequence[Summary], near: Mapping[Row, float] | None = None) -> Table:
    """One row a method and budget, the best mean first; one column a task.

    near: KL to full attention, a column if there is any.
    """
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
                *_nats_of(variant, near),
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
        "vs full",
        *([KL] if near else []),
        *tasks,
        "tokens attended",
        "ms a step",
        "KV MiB on the device",
    )
    return Table(heads, lines)


def score_table(some: Sequence[Summary], near: Mapping[Row, float] | None = None) -> Table:
    """One row a method and budget, one column a published benchmark.

    near: as for `accuracies`.
    """
    names = list(dict.fromkeys(one["benchmark"] for one in some))
    rows: dict[Row, dict[str, Summary]] = {}
    for one in some:
        rows.setdefault(tuple(named(one)), {})[one["benchmark"]] = one
    lines: list[list[Value]] = []
    for variant, found in sorted(rows.items(), key=lambda row: (row[0][0] != "full", -_score(row[1].values()), row[0])):
        cells = [f"{percent(found[name]['score'])}, n={found[name]['n']}" if name in found else "-" for name in names]
        lines.append([*variant, percent(_score(found.values())), *_nats_of(variant, near), *cells])
    return Table(("method", "budget", "dense layers", "mean", *([KL] if near else []), *names), lines)


def _score(some: Iterable[Summary]) -> float:
    return mean(one["score"] for one in some) or 0.0


def _nats_of(variant: Row, near: Mapping[Row, float] | None) -> list[str]:
    return [f"{near[variant]:.4f}" if variant in near else "-"] if near else []


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
