"""Plots, written without a display."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvthaw.errors import ConfigError
from kvthaw.evaluate.metrics import mean
from kvthaw.evaluate.results import Record
from kvthaw.evaluate.variant import Variant


def check(path: Path | None) -> None:
    """Raise ConfigError, before work is done for it, where no plot could be drawn into this file; None is no plot."""
    if path is None:
        return
    kinds = new(1, 1).canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise ConfigError(f"plot is {str(path)!r}; its suffix must be one of {', '.join(f'.{kind}' for kind in sorted(kinds))}")
    if not path.parent.is_dir():
        raise ConfigError(f"plot is {str(path)!r}; its folder does not exist")


def heat_maps(found: Mapping[tuple[Variant, int], Sequence[Record]], path: Path, *, title: str) -> None:
    """Accuracy by depth (down) and length (across), a panel a variant. found: a variant's records at each length.

    Raises ConfigError where matplotlib is missing, where no sample has a depth, or where the file's suffix is no picture's.
    """
    variants = list(dict.fromkeys(variant for variant, _ in found))
    lengths = sorted({length for _, length in found})
    every = [record for records in found.values() for record in records if record["at"] is not None]
    depths = sorted({record["depth"] for record in every if record["depth"] is not None})
    if not depths:
        problem = "the samples have no set depths, so there is no heat map; leave --depths as it is, or take a task with a fact"
        raise ConfigError(problem)
    across = min(3, len(variants))
    down = -(-len(variants) // across)
    wide = 2.0 + max(1.4, 0.6 * len(lengths))
    figure = new(across * wide + 1.2, down * (1.2 + 0.16 * len(depths)))
    axes = figure.subplots(down, across, squeeze=False).flatten()
    for axis, variant in zip(axes, variants, strict=False):
        cells = [[_cell(found[variant, length], depth) for length in lengths] for depth in depths]
        axis.imshow(cells, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
        axis.set_title(name(variant), fontsize=9)
        axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45, fontsize=7)
        ticks = range(0, len(depths), max(1, len(depths) // 10))
        axis.set_yticks(ticks, [f"{100 * depths[i]:.0f} %" for i in ticks], fontsize=7)
        axis.set_xlabel("tokens", fontsize=8)
        axis.set_ylabel("depth", fontsize=8)
    for axis in axes[len(variants) :]:
        axis.remove()
    figure.suptitle(title, fontsize=10)
    figure.colorbar(axes[0].images[0], ax=list(axes[: len(variants)]), label="accuracy", shrink=0.8)
    save(figure, path)


def perplexity_lines(found: Mapping[Variant, Sequence[dict[str, Any]]], path: Path) -> None:
    """Perplexity by position, and the distance to full attention in nats, a line a variant. Raises as heat_maps."""
    figure = new(11, 4.4)
    whole, apart = figure.subplots(1, 2)
    for number, (variant, rows) in enumerate(found.items()):
        places, color = [row["length"] for row in rows], f"C{number % 10}"
        whole.plot(places, [row["perplexity"] for row in rows], marker="o", markersize=3, color=color, label=name(variant))
        if variant.method == "full" or rows[0]["difference"] is None:
            continue
        low, high = ([row["difference_95"][side] for row in rows] for side in (0, 1))
        apart.plot(places, [row["difference"] for row in rows], marker="o", markersize=3, color=color)
        apart.fill_between(places, low, high, color=color, alpha=0.15, linewidth=0)
    whole.set_ylabel("perplexity")
    apart.set_ylabel("nats a token over full attention, 95 %")
    apart.axhline(0, color="grey", linewidth=0.8)
    for axis in (whole, apart):
        axis.set_xlabel("tokens before")
    whole.legend(fontsize=7)
    first = next(iter(found.values()))[0]
    said = f"{first['n']} place" + "s" * (first["n"] > 1)
    figure.suptitle(f"perplexity by position: {first['steps']} tokens each, from {said} of the text", fontsize=10)
    save(figure, path)


def score_bars(summaries: Sequence[dict[str, Any]], path: Path) -> None:
    """The score of every variant of published benchmarks, a panel each, with its 95 % interval where it has one, and a line at full
    attention's. Raises as heat_maps."""
    names = list(dict.fromkeys(one["benchmark"] for one in summaries))
    groups = [[one for one in summaries if one["benchmark"] == name] for name in names]
    columns = min(len(groups), 3)
    rows = -(-len(groups) // columns)
    figure = new(7 * columns, (1.6 + 0.3 * len(groups[0])) * rows)
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for axis, group in zip(panels, groups, strict=False):
        _bars(axis, group)
    for axis in panels[len(groups) :]:
        axis.axis("off")
    save(figure, path)


def _bars(axis: Any, group: Sequence[dict[str, Any]]) -> None:
    first, names = group[0], []
    for place, one in enumerate(group):
        full = one["method"] == "full"
        axis.barh(place, 100 * one["score"], color="0.6" if full else "C0", height=0.7)
        if one["score_95"] is not None:
            axis.plot([100 * side for side in one["score_95"]], (place, place), color="black", linewidth=1.2)
        if full:
            axis.axvline(100 * one["score"], color="grey", linewidth=0.8)
        asked = Variant(one["method"], one["budget"], one["retrieved"], one["dense_layers"])
        names.append("full" if full else name(asked))
    axis.set_yticks(range(len(group)), names, fontsize=7)
    axis.invert_yaxis()
    axis.set_xlim(0, 100)
    axis.set_xlabel(f"score (avg@{first['samples']}), %")
    questions = f"{first['n']} question{'s' * (first['n'] > 1)}"
    axis.set_title(f"{first['benchmark']}, question {first['question']}: {questions}", fontsize=10)


def by_budget(summaries: Sequence[dict[str, Any]]) -> Any:
    """Accuracy against the budget, a line a method over all tasks and lengths, and full attention's. Returns the figure."""
    figure = new(9, 4.8)
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
    """Time per output token against the context's length, and tokens a second against the batch. Raises as heat_maps."""
    figure = new(11, 4.2)
    left, right = figure.subplots(1, 2)
    by_length(left, records)
    by_batch(right, records)
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
    """(name, steps, colour, records) of every method as asked for and way to take steps; a method keeps its colour."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        found.setdefault((label(record), record["steps"]), []).append(record)
    colours = {name: f"C{i % 10}" for i, name in enumerate(dict.fromkeys(name for name, _ in found))}
    return [(name, steps, colours[name], runs) for (name, steps), runs in found.items()]


def label(record: Record) -> str:
    """Return a timed method with what was asked of it."""
    asked = record.setting
    words = [asked["method"]]
    if asked["budget"] is not None:
        words.append(str(asked["budget"]))
    if asked["retrieved"] is not None:
        words.append(f"top {asked['retrieved']}")
    if asked.get("hits") is not None:
        words.append(f"{asked['hits']:.0%} hits")
    return ", ".join(words)


def short(tokens: int) -> str:
    """36,864 as 36k, 1,048,576 as 1M."""
    for many, name in ((1 << 20, "M"), (1 << 10, "k")):
        if tokens >= many:
            return f"{tokens / many:.3g}{name}"
    return str(tokens)


def _look(colour: str, steps: str) -> dict[str, Any]:
    style = {"eager": ":", "captured": "--", "compiled": "-"}[steps]
    return {"color": colour, "linestyle": style, "marker": "o", "markersize": 4}


def new(width: float, height: float) -> Any:
    """Return an empty figure. Raises ConfigError where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError('a plot needs matplotlib: pip install "kvthaw[plot]"') from None
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


def name(variant: Variant) -> str:
    """Return a variant in a few words."""
    words = [variant.method]
    if variant.budget is not None:
        words.append(f"budget {variant.budget}")
    if variant.retrieved is not None:
        words.append(f"retrieved {variant.retrieved}")
    if variant.dense_layers is not None:
        words.append(f"{variant.dense_layers} dense")
    return ", ".join(words)


def _cell(records: Sequence[Record], depth: float) -> float:
    value = mean(record["accuracy"] for record in records if record["depth"] == depth and record["at"] is not None)
    return float("nan") if value is None else value
