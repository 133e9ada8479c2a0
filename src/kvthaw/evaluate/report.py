"""Tables of summaries for the terminal."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvthaw.engine.hub import display_name
from kvthaw.evaluate.results import Record
from kvthaw.evaluate.variant import Variant
from kvthaw.formatting import counted

Summary = dict[str, Any]

Row = Mapping[str, Any] | Record
Cell = Callable[[Any], str]
"""What a column shows of a row."""


def value(name: str, form: str = "{}", times: float = 1, none: str = "-") -> Cell:
    """Return a column of a field that may be missing."""

    def cell(row: Row) -> str:
        found = row[name]
        return none if found is None else form.format(found if times == 1 else found * times)

    return cell


def by_column(
    title: str, rows: Iterable[Row], columns: Mapping[str, Cell], *, words: Collection[str] = ("method",), sections: str = ""
) -> Table:
    """Return a table of rows by what each column shows of them.

    sections: a field whose change begins a section.
    """
    cells: list[Sequence[str]] = []
    for _, some in itertools.groupby(rows, key=lambda row: row[sections] if sections else None):
        cells += [*([cell(row) for cell in columns.values()] for row in some), ()]
    return lay_out(title, list(columns), cells, words=words)


def on(row: Summary) -> str:
    """Return a summary's model and machine, and the form of its prompts unless that was plain text."""
    asked = ", chat template" if row.get("chat") else ""
    asked += f", system {row['system']!r}" if row.get("system") else ""
    asked += "" if row.get("thinking") is None else f", thinking {'on' if row['thinking'] else 'off'}"
    return f"{display_name(row['model'])} in {row['dtype']} on {row['device']}{asked}"


def lay_out(
    title: str | None,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]] = (),
    *,
    words: Collection[str] = ("method", "benchmark", ""),
    folded: Collection[str] = (),
) -> Table:
    """Return a table.

    rows: an empty one begins a section.
    words: columns of words; all others hold numbers.
    folded: columns of sentences, which wrap if the terminal is narrow.
    """
    made = Table(title=title, box=SIMPLE_HEAD)
    for name in columns:
        made.add_column(name, justify="left" if name in words else "right", no_wrap=name not in folded, overflow="fold")
    for row in rows:
        if row:
            made.add_row(*row)
        else:
            made.add_section()
    return made


def named(summary: dict[str, Any]) -> Sequence[str]:
    """Return a variant as a table's first columns show it: its method, the requested budget, and its dense layers."""
    asked = Variant.of(summary)
    return asked.method, asked.limit or "-", str(asked.dense_layers)


KL = "KL to full"
DENSE = "dense layers"
AGREEMENT = ("method", "budget", DENSE, KL, "95 % interval", "99th percentile", "same top %", "tokens attended")
"""Columns of `agreement_rows`."""
_NAMED = 4
"""How many methods a sentence names that fall short; more are counted."""


def agreements(summaries: Sequence[Summary]) -> Table:
    """Return how near variants are to full attention for the terminal; see `agreement_rows` and `enough`."""
    title = f"KL(full || method) in nats a token: {compared(summaries[0])}, {on(summaries[0])}"
    others = [one for one in summaries if one["method"] != "full"]  # whose divergence from itself is 0
    rows, columns = agreement_rows(others or summaries), [*range(len(AGREEMENT) - 1)]
    if len({tuple(row[:2]) for row in rows}) == len(rows):  # the method and the budget name a row
        columns.remove(AGREEMENT.index(DENSE))
    made = narrow(title, [AGREEMENT[at] for at in columns], [[row[at] for at in columns] for row in rows])
    made.caption = enough(summaries) or None
    return made


def agreement_rows(summaries: Sequence[Summary]) -> list[list[str]]:
    """One row a variant, the nearest of each budget first."""
    lines: list[list[str]] = []
    for one in sorted(summaries, key=lambda one: (one["method"] == "full", one["budget"] or 0, one["kl"])):
        low_high = "" if one["kl_95"] is None else f"{one['kl_95'][0]:.4f}-{one['kl_95'][1]:.4f}"
        attended = "all" if one["attended_mean"] is None else f"{one['attended_mean']:.0f}"
        kl = [f"{one['kl']:.4f}", low_high, f"{one['kl_p99']:.4f}", f"{100 * one['same_top']:.1f}"]
        lines.append([*named(one), *kl, attended])
    return lines


def enough(summaries: Sequence[Summary]) -> str:
    """Return in words from which budget on 99 % of each method's likeliest next tokens is full attention's. A budget
    counts if all larger ones of the method do too. Returns "" where no method but full attention was measured."""
    methods: dict[tuple[str, str], list[tuple[str, bool]]] = {}
    for one in sorted(summaries, key=lambda one: one["attended_mean"] or 0):
        if one["method"] != "full":
            method, limit, dense = named(one)
            methods.setdefault((method, dense), []).append((limit, one["same_top"] >= 0.99))
    names, found, never = [method for method, _ in methods], dict[str, list[str]](), list[str]()
    for (method, dense), budgets in methods.items():
        name = f"{method} with {dense} dense layers" if names.count(method) > 1 else method
        kept = list(takewhile(lambda one: one[1], reversed(budgets)))
        if kept:
            found.setdefault(kept[-1][0], []).append(name)
        else:
            never.append(name)
    if not found:
        return "No method keeps 99 % of full attention's next tokens with these budgets." if never else ""
    enough = "; ".join(f"{limit} for {', '.join(some)}" for limit, some in found.items())
    rest = ", ".join(never) if len(never) <= _NAMED else f"the other {len(never)}"
    said = f"Budgets from which on 99 % of next tokens are full attention's: {enough}."
    return said + f" None of these is enough for {rest}." * bool(never)


def compared(one: Summary) -> str:
    """Return a description of the tokens that a summary's next tokens follow."""
    follows = "full attention's greedy answers" if one["answer"] == "greedy" else "the text that follows"
    lengths = f"{one['lengths'][0]:,}" + (f" to {one['lengths'][-1]:,}" if len(one["lengths"]) > 1 else "")
    return f"{counted(one['tokens'], 'token')} of {follows}, {counted(one['n'], 'prompt')} of {lengths} tokens"


def narrow(title: str, columns: Iterable[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table whose column names wrap."""
    return lay_out(title, [textwrap.fill(name, 8, break_long_words=False) for name in columns], rows)
