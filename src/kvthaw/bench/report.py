"""Lines of the decode benchmark as a table and as plots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvthaw.bench.lines import Line
from kvthaw.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

_STYLE = {"eager": ":", "captured": "--", "compiled": "-"}
_PARTS = ("query", "residency", "fetch", "attention", "model")
"""Of a step, in the order that a layer takes them; a profile has others beside these."""


def table(lines: Sequence[Line]) -> Table:
    """Times, bytes on the device and hit rates, a row a line."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    first = lines[0]
    made = Table(
        title=f"decode, {first.setting.shape}, {first.setting.device}, commit {first.about.get('commit')}", box=SIMPLE_HEAD
    )
    for name in ("method", "steps"):
        made.add_column(name)
    numbers = (
        "tokens",
        "rows",
        "TTFT s",
        "TT2T s",
        "TPOT ms",
        "p50",
        "p95",
        "tokens/s",
        "x floor",
        "hits",
        "KV + index",
        "of full",
    )
    for name in numbers:
        made.add_column(name, justify="right")
    for line in lines:
        asked = line.setting
        device = line.kv_device_bytes + line.index_device_bytes + line.kv_dense_bytes
        made.add_row(
            label(line),
            asked.steps,
            f"{asked.length:,}",
            str(asked.batch),
            _known(line.ttft_s, "{:.3f}"),
            _known(line.tt2t_s, "{:.3f}"),
            f"{1e3 * line.tpot_s:.2f}",
            f"{1e3 * line.itl_p50_s:.2f}",
            f"{1e3 * line.itl_p95_s:.2f}",
            f"{line.tokens_per_s:.1f}",
            f"{line.floor_ratio:.2f}",
            _known(line.hit_rate, "{:.0%}"),
            f"{device / 2**20:,.1f} MiB",
            f"{line.share_with_dense:.1%}",
        )
    return made


def details(lines: Sequence[Line]) -> Table:
    """Where a step's time goes, what crosses the bus for it, and what its capture took, a row a line."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    parts = [part for part in _PARTS if any(part in line.parts_s for line in lines)]
    parts += sorted({part for line in lines for part in line.parts_s} - {*parts})
    captured = any(line.captures for line in lines)
    made = Table(title="a step by parts, the device idle before each where it is eager", box=SIMPLE_HEAD)
    made.add_column("method")
    made.add_column("steps")
    numbers = ("tokens", "rows", *(f"{part} ms" for part in parts), "bus MB", "floor ms", "host MiB")
    for name in (*numbers, *(("captures", "took s", "holds MiB") if captured else ())):
        made.add_column(name, justify="right")
    for line in lines:
        asked = line.setting
        times = [_known(line.parts_s.get(part), "{:.3f}", 1e3) for part in parts]
        rest = [f"{line.bus_bytes / 1e6:.2f}", f"{1e3 * line.floor_s:.3f}", f"{line.kv_host_bytes / 2**20:,.1f}"]
        if captured:
            rest += [
                _known(line.captures, "{}"),
                _known(line.capture_s, "{:.2f}"),
                _known(line.capture_bytes, "{:,.1f}", 2**-20),
            ]
        made.add_row(label(line), asked.steps, f"{asked.length:,}", str(asked.batch), *times, *rest)
    return made


def label(line: Line) -> str:
    """A line's method with what was asked of it."""
    asked = line.setting
    words = [asked.method]
    if asked.budget is not None:
        words.append(f"{asked.budget}")
    if asked.retrieved is not None:
        words.append(f"top {asked.retrieved}")
    if asked.hits is not None:
        words.append(f"{asked.hits:.0%} hits")
    return ", ".join(words)


def plot(lines: Sequence[Line], path: Path) -> None:
    """Time per output token against the length of the context, and tokens a second against the batch, in one picture."""
    made = figure(11, 4.2)
    left, right = made.subplots(1, 2)
    by_length(left, lines)
    by_batch(right, lines)
    save(made, path)


def by_length(axes: Any, lines: Sequence[Line]) -> None:
    """Time per output token against the length, at the smallest batch of each series."""
    for name, steps, colour, runs in series(lines):
        least = min(run.setting.batch for run in runs)
        shown = sorted((run for run in runs if run.setting.batch == least), key=lambda run: run.setting.length)
        x = [run.setting.length for run in shown]
        axes.plot(x, [1e3 * run.tpot_s for run in shown], label=f"{name} ({steps})", **_look(colour, steps))
    axes.set(xscale="log", xlabel="context, tokens", ylabel="time per output token, ms", ylim=(0, None))
    lengths(axes, [line.setting.length for line in lines])
    axes.legend(fontsize=7)


def by_batch(axes: Any, lines: Sequence[Line]) -> None:
    """Tokens a second against the batch, at the longest length of each series."""
    for name, steps, colour, runs in series(lines):
        most = max(run.setting.length for run in runs)
        shown = sorted((run for run in runs if run.setting.length == most), key=lambda run: run.setting.batch)
        x = [run.setting.batch for run in shown]
        axes.plot(x, [run.tokens_per_s for run in shown], label=f"{name}, {short(most)} ({steps})", **_look(colour, steps))
    axes.set(xlabel="batch, rows", ylabel="tokens a second", ylim=(0, None))
    axes.set_xticks(sorted({line.setting.batch for line in lines}))
    axes.legend(fontsize=7)


def series(lines: Iterable[Line]) -> list[tuple[str, str, str, list[Line]]]:
    """(name, steps, colour, lines) of every method as asked for and way to take steps; a method keeps its colour."""
    found: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        found.setdefault((label(line), line.setting.steps), []).append(line)
    colours = {name: f"C{i % 10}" for i, name in enumerate(dict.fromkeys(name for name, _ in found))}
    return [(name, steps, colours[name], runs) for (name, steps), runs in found.items()]


def lengths(axes: Any, found: Iterable[int]) -> None:
    """Ticks of a logarithmic axis at the lengths there are, as 64k."""
    ticks = sorted(set(found))
    axes.set_xticks(ticks, [short(n) for n in ticks], fontsize=7)
    axes.minorticks_off()


def short(tokens: int) -> str:
    """36,864 as 36k, 1,048,576 as 1M."""
    for many, name in ((1 << 20, "M"), (1 << 10, "k")):
        if tokens >= many:
            return f"{tokens / many:.3g}{name}"
    return str(tokens)


def figure(width: float, height: float) -> Any:
    """An empty figure. Raises ConfigError where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError('a plot needs matplotlib: pip install "kvthaw[plot]"') from None
    return Figure(figsize=(width, height), layout="constrained")


def check(path: Path | None) -> None:
    """Raise ConfigError, before work is done for it, where no plot could be drawn into this file; None is no plot."""
    if path is None:
        return
    kinds = figure(1, 1).canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise ConfigError(f"plot is {str(path)!r}; its suffix must be one of {', '.join(f'.{kind}' for kind in sorted(kinds))}")
    if not path.parent.is_dir():
        raise ConfigError(f"plot is {str(path)!r}; its folder does not exist")


def save(made: Any, path: Path) -> None:
    """Write a figure. Raises ConfigError as check."""
    check(path)
    made.savefig(path, dpi=130)


def _look(colour: str, steps: str) -> dict[str, Any]:
    return {"color": colour, "linestyle": _STYLE[steps], "marker": "o", "markersize": 4}


def _known(value: float | None, form: str, times: float = 1) -> str:
    return "-" if value is None else form.format(value * times)
