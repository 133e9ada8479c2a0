"""Plots, written without a display."""

from __future__ import annotations

import io
import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvthaw.bench.settings import label
from kvthaw.errors import ConfigError
from kvthaw.evaluate.results import Record, mean
from kvthaw.evaluate.variant import Variant
from kvthaw.formatting import counted, short
from lab.evaluate.metrics import wilson


def check(path: Path | None) -> None:
    """Raise ConfigError, before any work, if no plot could be drawn into this file. None asks for no plot."""
    if path is None:
        return
    kinds = new(1, 1).canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise ConfigError(f"plot is {str(path)!r}; its suffix must be one of {', '.join(f'.{kind}' for kind in sorted(kinds))}")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"plot is {str(path)!r}; its folder does not exist or cannot be written to")


@dataclass(frozen=True, slots=True)
class Bar:
    """A value of a variant with its 95 % interval. Full attention's bar is grey, with a line at its value."""

    name: str
    value: float
    interval: Sequence[float] | None = None
    full: bool = False


Found = Mapping[tuple[str, Variant, int], Sequence[Record]]
"""Records of a task under a variant at a length."""


def accuracies(found: Found, path: Path, *, title: str) -> None:
    """Accuracy of tasks: at one length a bar a variant, a panel a task; else maps of depth by length. Raises ConfigError where
    matplotlib is missing, or where the file's suffix is no picture's."""
    if len({length for _, _, length in found}) > 1:
        heat_maps(found, path, title=title)
        return
    panels: dict[str, list[Bar]] = {}
    for (task, variant, length), records in found.items():
        right, n = sum(record["accuracy"] for record in records) / len(records), len(records)
        interval = [100 * side for side in wilson(right, n)]
        full = variant.method == "full"
        bar = Bar(variant.label, 100 * right, interval, full)
        panels.setdefault(f"{task}, {length:,} tokens, n={n}", []).append(bar)
    figure = _bar_panels(panels, "accuracy, %", most=100)
    figure.suptitle(title, fontsize=10)
    save(figure, path)


def heat_maps(found: Found, path: Path, *, title: str) -> None:
    """Accuracy in percent by depth (down) and length (across), a panel a task and variant; one row where samples have no depth."""
    panels = list(dict.fromkeys((task, variant) for task, variant, _ in found))
    lengths = sorted({length for _, _, length in found})
    depths = {task: _depths([one for (of, *_), some in found.items() if of == task for one in some]) for task, _ in panels}
    columns, rows = _arranged(len(panels))
    figure = new(columns * (2.0 + max(1.6, 0.6 * len(lengths))) + 1.2, rows * (1.4 + 0.2 * max(map(len, depths.values()))))
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, (task, variant) in zip(axes, panels, strict=False):
        down = depths[task]
        cells = [[_cell(found.get((task, variant, length), ()), depth) for length in lengths] for depth in down]
        axis.imshow(cells, cmap="viridis", vmin=0, vmax=1, aspect="auto")
        for (y, row), x in itertools.product(enumerate(cells), range(len(lengths))):
            if row[x] == row[x]:
                ink = "white" if row[x] < 0.6 else "black"
                axis.text(x, y, f"{100 * row[x]:.0f}", ha="center", va="center", fontsize=6, color=ink)
        axis.set_title(variant.label if len(depths) == 1 else f"{task}: {variant.label}", fontsize=9)
        axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45, fontsize=7)
        ticks = range(0, len(down), max(1, len(down) // 10))
        axis.set_yticks(ticks, ["all" if (at := down[i]) is None else f"{100 * at:.0f} %" for i in ticks], fontsize=7)
        axis.set_xlabel("tokens", fontsize=8)
        axis.set_ylabel("depth", fontsize=8)
    for axis in axes[len(panels) :]:
        axis.remove()
    figure.suptitle(f"{title}: accuracy, %", fontsize=10)
    save(figure, path)


def _depths(records: Sequence[Record]) -> list[float | None]:
    """Return the requested depths of the samples' facts, or only None for samples without facts."""
    return sorted({one["depth"] for one in records if one["at"] is not None and one["depth"] is not None}) or [None]


def _bar_panels(panels: Mapping[str, Sequence[Bar]], unit: str, most: float | None = None) -> Any:
    """Return a figure with bars, a panel each."""
    columns, rows = _arranged(len(panels))
    figure = new(6.5 * columns, (1.6 + 0.3 * max(map(len, panels.values()))) * rows)
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for axis, (title, bars) in zip(axes, panels.items(), strict=False):
        draw_bars(axis, bars, unit)
        axis.set_title(title, fontsize=10)
        if most is not None:
            axis.set_xlim(0, 1.12 * most)
    for axis in axes[len(panels) :]:
        axis.remove()
    return figure


def _arranged(panels: int) -> tuple[int, int]:
    """Return columns and rows, full ones if that can be."""
    columns = next((n for n in (3, 2) if panels % n == 0), min(3, panels))
    return columns, -(-panels // columns)


def draw_bars(axis: Any, bars: Sequence[Bar], unit: str) -> None:
    """Draw horizontal bars with their values, full attention's first."""
    bars = sorted(bars, key=lambda bar: not bar.full)
    for place, bar in enumerate(bars):
        axis.barh(place, bar.value, color="0.6" if bar.full else "C0", height=0.7)
        if bar.interval is not None:
            axis.plot(bar.interval, (place, place), color="black", linewidth=1)
        if bar.full:
            axis.axvline(bar.value, color="grey", linewidth=0.8)
        end = max(bar.value, 0.0, *(bar.interval or ()))
        axis.annotate(f"{bar.value:.3g}", (end, place), (4, 0), textcoords="offset points", va="center", fontsize=7)
    axis.set_yticks(range(len(bars)), [bar.name for bar in bars], fontsize=7)
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.set_xlabel(unit, fontsize=8)


def perplexity_lines(found: Mapping[Variant, Sequence[dict[str, Any]]], path: Path) -> None:
    """Perplexity by position, and the distance to full attention in nats, a line a variant. Raises as accuracies."""
    figure = new(11, 4.4)
    whole, apart = figure.subplots(1, 2)
    nats = "nats a token over full attention, 95 %"
    if all(len(rows) == 1 for rows in found.values()):
        only = {variant: rows[0] for variant, rows in found.items()}
        bars = [Bar(v.label, row["perplexity"], full=v.method == "full") for v, row in only.items()]
        draw_bars(whole, bars, f"perplexity after {next(iter(only.values()))['length']:,} tokens")
        gaps = [(v, row) for v, row in only.items() if v.method != "full" and row["difference"] is not None]
        draw_bars(apart, [Bar(v.label, row["difference"], row["difference_95"]) for v, row in gaps], nats)
    else:
        _by_position(whole, apart, found, nats)
    first = next(iter(found.values()))[0]
    said = counted(first["n"], "place")
    figure.suptitle(f"perplexity by position: {first['steps']} tokens each, from {said} of the text", fontsize=10)
    save(figure, path)


def _by_position(whole: Any, apart: Any, found: Mapping[Variant, Sequence[dict[str, Any]]], nats: str) -> None:
    for number, (variant, rows) in enumerate(found.items()):
        places, color = [row["length"] for row in rows], f"C{number % 10}"
        whole.plot(places, [row["perplexity"] for row in rows], marker="o", markersize=3, color=color, label=variant.label)
        if variant.method == "full" or rows[0]["difference"] is None:
            continue
        low, high = ([row["difference_95"][side] for row in rows] for side in (0, 1))
        apart.plot(places, [row["difference"] for row in rows], marker="o", markersize=3, color=color)
        apart.fill_between(places, low, high, color=color, alpha=0.15, linewidth=0)
    whole.set_ylabel("perplexity")
    apart.set_ylabel(nats)
    apart.axhline(0, color="grey", linewidth=0.8)
    for axis in (whole, apart):
        axis.set_xlabel("tokens before")
    whole.legend(fontsize=7)


def score_bars(summaries: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot the score of every variant of published benchmarks, one panel each, with a line at full attention's score.

    Scores have their 95 % interval if known. Raises as accuracies does.
    """
    panels: dict[str, list[Bar]] = {}
    for one in summaries:
        questions = counted(one["n"], "question")
        interval = None if one["score_95"] is None else [100 * side for side in one["score_95"]]
        full = one["method"] == "full"
        panels.setdefault(f"{one['benchmark']}, question {one['question']}: {questions}", []).append(
            Bar(Variant.of(one).label, 100 * one["score"], interval, full)
        )
    save(_bar_panels(panels, f"score (avg@{summaries[0]['samples']}), %", most=100), path)


def by_budget(summaries: Sequence[dict[str, Any]]) -> Any:
    """Accuracy against the budget, a line a method over all tasks and lengths, and full attention's; with one budget bars. Returns
    the figure."""
    if len({one["budget"] for one in summaries if one["method"] != "full"}) == 1:
        panels: dict[str, list[float]] = {}
        for one in summaries:
            panels.setdefault(one["method"], []).append(100 * one["accuracy"])
        bars = [Bar(method, sum(of) / len(of), full=method == "full") for method, of in panels.items()]
        return _bar_panels({"": bars}, "accuracy, %", most=100)
    figure = new(7.5, 4.4)
    axes = figure.subplots()
    budgets = sorted({one["budget"] for one in summaries if one["budget"] is not None})
    for number, method in enumerate(dict.fromkeys(one["method"] for one in summaries if one["method"] != "full")):
        of = {b: [one["accuracy"] for one in summaries if (one["method"], one["budget"]) == (method, b)] for b in budgets}
        points = [(budget, sum(found) / len(found)) for budget, found in of.items() if found]
        look = {"color": f"C{number % 10}", "marker": "osD^v<>pPXh*dH8"[number % 15], "markersize": 4, "label": method}
        axes.plot(*zip(*points, strict=True), **look)
    full = mean(one["accuracy"] for one in summaries if one["method"] == "full")
    if full is not None:
        axes.axhline(full, color="black", linestyle="--", linewidth=1, label="full")
    axes.set(xscale="log", xlabel="budget, tokens per KV head and step", ylabel="accuracy", ylim=(-0.03, 1.03))
    axes.set_xticks(budgets, [str(budget) for budget in budgets])
    axes.minorticks_off()
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def decode_lines(records: Sequence[Record], path: Path) -> None:
    """Time per output token against the context's length, as bars at one, and tokens a second against several batches. Raises
    as accuracies."""
    batches, lengths = ({record[of] for record in records} for of in ("batch", "length"))
    figure = new(11 if len(batches) > 1 else 6.5, 4.2)
    panels = figure.subplots(1, 1 + (len(batches) > 1), squeeze=False)[0]
    if len(lengths) > 1:
        by_length(panels[0], records)
    else:
        least = [record for record in records if record["batch"] == min(batches)]
        bars = [Bar(f"{label(one)} ({one['steps']})", 1e3 * one["tpot_s"], full=one["method"] == "full") for one in least]
        draw_bars(panels[0], bars, f"time per output token at {lengths.pop():,} tokens, ms")
    if len(batches) > 1:
        by_batch(panels[1], records)
    save(figure, path)


def by_length(axes: Any, records: Sequence[Record]) -> None:
    """Time per output token against the length, at the smallest batch of each series."""
    for name, steps, colour, runs in series(records):
        least = min(run["batch"] for run in runs)
        shown = sorted((run for run in runs if run["batch"] == least), key=lambda run: int(run["length"]))
        x = [run["length"] for run in shown]
        axes.plot(x, [1e3 * run["tpot_s"] for run in shown], label=f"{name} ({steps})", **_look(colour, steps))
    axes.set(xscale="log", xlabel="context, tokens", ylabel="time per output token, ms", ylim=(0, None))
    ticks = sorted({record["length"] for record in records})
    axes.set_xticks(ticks, [short(n) for n in ticks], fontsize=7)
    axes.minorticks_off()
    axes.legend(fontsize=7)


def by_batch(axes: Any, records: Sequence[Record]) -> None:
    """Tokens a second against the batch, at the longest length of each series."""
    for name, steps, colour, runs in series(records):
        most = max(run["length"] for run in runs)
        shown = sorted((run for run in runs if run["length"] == most), key=lambda run: int(run["batch"]))
        label = f"{name}, {short(most)} ({steps})"
        axes.plot([run["batch"] for run in shown], [run["tokens_per_s"] for run in shown], label=label, **_look(colour, steps))
    axes.set(xlabel="batch, rows", ylabel="tokens a second", ylim=(0, None))
    axes.set_xticks(sorted({record["batch"] for record in records}))
    axes.legend(fontsize=7)


def series(records: Iterable[Record]) -> list[tuple[str, str, str, list[Record]]]:
    """Return (name, steps, colour, records) for every requested method and kind of step. A method keeps its colour."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        found.setdefault((label(record), record["steps"]), []).append(record)
    colours = {name: f"C{i % 10}" for i, name in enumerate(dict.fromkeys(name for name, _ in found))}
    return [(name, steps, colours[name], runs) for (name, steps), runs in found.items()]


def _look(colour: str, steps: str) -> dict[str, Any]:
    style = {"eager": ":", "captured": "--", "compiled": "-"}[steps]
    return {"color": colour, "linestyle": style, "marker": "o", "markersize": 4}


def new(width: float, height: float) -> Any:
    """Return an empty figure. Raises ConfigError where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError('a plot needs matplotlib: pip install "kvthaw[lab]"') from None
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path) -> None:
    """Write a figure. Raises ConfigError as check."""
    check(path)
    figure.savefig(path, dpi=150)


def svg(figure: Any) -> str:
    """Return a figure as an SVG element, the same for the same numbers."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "kvthaw"}):
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return re.sub(r"^.*?(?=<svg )", "", out.getvalue(), flags=re.DOTALL)


def _cell(records: Sequence[Record], depth: float | None) -> float:
    value = mean(record["accuracy"] for record in records if depth is None or record["depth"] == depth)
    return float("nan") if value is None else value
