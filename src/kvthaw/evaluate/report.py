"""Tables of summaries for the terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvthaw.engine.hub import display_name
from kvthaw.evaluate.metrics import mean

Summary = dict[str, Any]

_COLUMNS = (
    "length",
    "method",
    "budget",
    "dense\nlayers",
    "accuracy",
    "full",
    "95 %",
    "tokens\nattended",
    "mass",
    "recall\nat k",
    "hit\nrate",
    "KV MiB\ndevice",
    "KV MiB\nhost",
    "TTFT\ns",
    "TPOT\nms",
)


def table(summaries: Sequence[Summary]) -> Table:
    """One row a run; shares in percent."""
    first = summaries[0]
    samples = " / ".join(dict.fromkeys(str(row["n"]) for row in summaries))
    made = lay_out(f"{first['task']}: {samples} samples, question {first['question']}, {on(first)}", _COLUMNS)
    length = first["length"]
    for row in summaries:
        if row["length"] != length:
            made.add_section()
            length = row["length"]
        low, high = row["accuracy_95"]
        made.add_row(
            f"{row['length']:,}",
            row["method"],
            "-" if row["budget"] is None else str(row["budget"]),
            str(row["dense_layers"]),
            percent(row["accuracy"]),
            percent(row["full_accuracy"]),
            f"{100 * low:.0f}-{100 * high:.0f}",
            "all" if row["attended_mean"] is None else f"{row['attended_mean']:.0f}",
            percent(row["attention_mass"]),
            percent(row["recall_at_k"]),
            percent(row["hit_rate"]),
            mebibytes(row["kv_device_bytes"]),
            mebibytes(row["kv_host_bytes"]),
            "-" if row["ttft_s"] is None else f"{row['ttft_s']:.2f}",
            milliseconds(row["tpot_s"]),
        )
    return made


def by_benchmark(summaries: Sequence[Summary]) -> Table:
    """Scores in percent, a row a benchmark and a column a variant, and their mean over the benchmarks."""
    first, variants = summaries[0], list(dict.fromkeys(map(_column, summaries)))
    title = f"avg@{first['samples']}, question {first['question']}, {on(first)}"
    made = lay_out(title, ("benchmark", "questions", *variants))
    every: dict[str, list[float]] = {variant: [] for variant in variants}
    for benchmark in dict.fromkeys(row["benchmark"] for row in summaries):
        rows = {_column(row): row for row in summaries if row["benchmark"] == benchmark}
        for variant in variants:
            every[variant].append(rows[variant]["score"])
        made.add_row(benchmark, f"{rows[variants[0]]['n']:,}", *(percent(rows[variant]["score"]) for variant in variants))
    made.add_section()
    made.add_row("mean", "", *(percent(mean(values)) for values in every.values()))
    return made


def scores(summaries: Sequence[Summary]) -> Table:
    """Scores of a published benchmark: one row a variant; shares in percent."""
    first, drawn = summaries[0], ""
    if first["temperature"]:
        answers = f"{first['samples']} answer{'s' * (first['samples'] > 1)} each"
        drawn = f", {answers} at temperature {first['temperature']:g}, top-p {first['top_p']:g}"
    questions = f"{first['n']} question{'s' * (first['n'] > 1)}"
    title = f"{first['benchmark']}: {questions}{drawn}, question {first['question']}, {on(first)}"
    ks = [k for k in first["pass_at"] if k > 1]
    extra = list(dict.fromkeys(name for row in summaries for name in row["scores"]))
    columns = ("method", "budget", "dense\nlayers", f"avg@{first['samples']}", "95 %", *(f"pass@{k}" for k in ks), *extra)
    watched = ("mass", "recall\nat k", "recall,\nlast 1/4") if any(row["drift"] for row in summaries) else ()
    made = lay_out(title, (*columns, *watched, "ended", "tokens\nprompt", "tokens\nanswer", "tokens\nattended", "hit\nrate"))
    for row in summaries:
        made.add_row(
            row["method"],
            _limit(row),
            str(row["dense_layers"]),
            percent(row["score"]),
            "-" if row["score_95"] is None else "{:.0f}-{:.0f}".format(*(100 * side for side in row["score_95"])),
            *(percent(row["pass_at"].get(k)) for k in ks),
            *(percent(row["scores"].get(name)) for name in extra),
            *[percent(value) for value in (row["attention_mass"], row["recall_at_k"], (row["drift"] or [None])[-1]) if watched],
            percent(row["ended"]),
            f"{row['tokens']:,.0f}",
            f"{row['new_tokens']:,.0f}",
            "all" if row["attended_mean"] is None else f"{row['attended_mean']:,.1f}",
            percent(row["hit_rate"]),
        )
    return made


def _column(row: Summary) -> str:
    asked = _limit(row).replace("-", "")
    return (
        str(row["method"]) + (f"\n{asked}" if asked else "") + (f"\n{row['dense_layers']} dense" if row["dense_layers"] else "")
    )


def _limit(row: Summary) -> str:
    if row["budget"] is None and row["retrieved"] is None:
        return "-"
    return str(row["budget"] or f"{row['retrieved']} retrieved")


def on(row: Summary) -> str:
    """Return the model of a summary and what it ran on."""
    return f"{display_name(row['model'])} in {row['dtype']} on {row['device']}"


def lay_out(
    title: str | None,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]] = (),
    *,
    words: Collection[str] = ("method", "benchmark", ""),
    folded: Collection[str] = (),
) -> Table:
    """Return a table. rows: an empty one begins a section. words: columns of words, beside which all are of numbers. folded:
    columns of sentences, which take several lines where the terminal is narrow."""
    made = Table(title=title, box=SIMPLE_HEAD)
    for name in columns:
        made.add_column(name, justify="left" if name in words else "right", no_wrap=name not in folded, overflow="fold")
    for row in rows:
        if row:
            made.add_row(*row)
        else:
            made.add_section()
    return made


def percent(value: float | None) -> str:
    """Return a share with one digit, without the sign."""
    return "-" if value is None else f"{100 * value:.1f}"


def milliseconds(seconds: float | None) -> str:
    """Return seconds in ms."""
    return "-" if seconds is None else f"{1000 * seconds:.1f}"


def mebibytes(count: int) -> str:
    """Return the bytes in MiB."""
    return f"{count / 2**20:.1f}"
