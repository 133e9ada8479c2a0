"""Tables of tasks' and benchmarks' summaries for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from kvthaw.evaluate.report import Cell, Summary, by_column, lay_out, on, value
from kvthaw.evaluate.results import mean
from kvthaw.evaluate.variant import Variant
from kvthaw.formatting import counted


def share(name: str) -> Cell:
    """Return a column of shares in percent."""
    return value(name, "{:.1f}", 100)


def interval(name: str) -> Cell:
    """Return a column of intervals in percent."""
    return lambda row: "-" if row[name] is None else "{:.0f}-{:.0f}".format(*(100 * side for side in row[name]))


def table(summaries: Sequence[Summary]) -> Table:
    """One row a run; shares in percent."""
    first = summaries[0]
    samples = " / ".join(dict.fromkeys(str(row["n"]) for row in summaries))
    columns = {
        "length": value("length", "{:,}"),
        "method": value("method"),
        "budget": _limit,
        "dense\nlayers": value("dense_layers"),
        "accuracy": share("accuracy"),
        "full": share("full_accuracy"),
        "95 %": interval("accuracy_95"),
        "tokens\nattended": value("attended_mean", "{:.0f}", none="all"),
        "mass": share("attention_mass"),
        "recall\nat k": share("recall_at_k"),
        "hit\nrate": share("hit_rate"),
        "KV MiB\ndevice": value("kv_device_bytes", "{:.1f}", 2**-20),
        "KV MiB\nhost": value("kv_host_bytes", "{:.1f}", 2**-20),
        "TTFT\ns": value("ttft_s", "{:.2f}"),
        "TPOT\nms": value("tpot_s", "{:.1f}", 1e3),
    }
    title = f"{first['task']}: {samples} samples, question {first['question']}, {on(first)}"
    return by_column(title, summaries, columns, sections="length")


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
        answers = f"{counted(first['samples'], 'answer')} each"
        drawn = f", {answers} at temperature {first['temperature']:g}, top-p {first['top_p']:g}"
    questions = counted(first["n"], "question")
    title = f"{first['benchmark']}: {questions}{drawn}, question {first['question']}, {on(first)}"
    extra = sorted(dict.fromkeys(name for row in summaries for name in row["scores"]), key=lambda name: name.count(" "))
    columns: dict[str, Cell] = {
        "method": value("method"),
        "budget": _limit,
        "dense\nlayers": value("dense_layers"),
        f"avg@{first['samples']}": share("score"),
        "95 %": interval("score_95"),
        **{f"pass@{k}": lambda row, k=k: percent(row["pass_at"].get(k)) for k in first["pass_at"] if k > 1},  # type: ignore[misc]
        **{name: lambda row, name=name: percent(row["scores"].get(name)) for name in extra},  # type: ignore[misc]
    }
    if any(row["drift"] for row in summaries):
        columns |= {"mass": share("attention_mass"), "recall\nat k": share("recall_at_k")}
        columns["recall,\nlast 1/4"] = lambda row: percent((row["drift"] or [None])[-1])
    columns |= {
        "ended": share("ended"),
        "tokens\nprompt": value("tokens", "{:,.0f}"),
        "tokens\nanswer": value("new_tokens", "{:,.0f}"),
        "tokens\nattended": value("attended_mean", "{:,.1f}", none="all"),
        "hit\nrate": share("hit_rate"),
    }
    return by_column(title, summaries, columns)


def _column(row: Summary) -> str:
    dense = f"{row['dense_layers']} dense" if row["dense_layers"] else None
    return "\n".join(filter(None, [row["method"], Variant.of(row).limit, dense]))


def _limit(row: Summary) -> str:
    return Variant.of(row).limit or "-"


def percent(value: float | None) -> str:
    """Return a share with one digit, without the sign."""
    return "-" if value is None else f"{100 * value:.1f}"


def milliseconds(seconds: float | None) -> str:
    """Return seconds in ms."""
    return "-" if seconds is None else f"{1000 * seconds:.1f}"
