"""Lines of the decode benchmark as a table and as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvthaw.errors import ConfigError

_STYLE = {"eager": ":", "captured": "--", "compiled": "-"}


def table(lines: list[dict[str, Any]]) -> None:
    """Print times and bytes, a row a run."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=f"decode, {lines[0]['shape']}, {lines[0]['gpu'] or lines[0]['cpu']}")
    for name in (
        "method",
        "steps",
        "length",
        "batch",
        "TTFT s",
        "TT2T s",
        "TPOT ms",
        "p95 ms",
        "tokens/s",
        "KV on device",
        "of full",
    ):
        shown.add_column(name, justify="right" if name not in ("method", "steps") else "left")
    for line in lines:
        device = line.get("kv_device_bytes", 0) + line.get("kv_dense_bytes", 0) or line["full_kv_bytes"]
        shown.add_row(
            line["method"],
            line["steps"],
            f"{line['length']:,}",
            str(line["batch"]),
            f"{line['ttft_s']:.3f}",
            f"{line['tt2t_s']:.3f}",
            f"{1e3 * line['tpot_s']:.2f}",
            f"{1e3 * line['itl_p95_s']:.2f}",
            f"{line['tokens_per_s']:.1f}",
            f"{device / 2**20:,.1f} MiB",
            f"{device / line['full_kv_bytes']:.1%}",
        )
    Console().print(shown)


def plot(lines: list[dict[str, Any]], path: Path) -> None:
    """Time per output token against the length of the context, and tokens a second against the batch, as a PNG."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'kvthaw[plot]'") from None
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    by_length, by_batch = figure.subplots(1, 2)
    series: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        series.setdefault((line["method"], line["steps"]), []).append(line)
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(name for name, _ in series))}
    for (name, steps), runs in series.items():
        look: dict[str, Any] = {"color": colours[name], "linestyle": _STYLE[steps], "marker": "o", "label": f"{name} ({steps})"}
        single = sorted((r for r in runs if r["batch"] == min(x["batch"] for x in runs)), key=lambda r: r["length"])
        by_length.plot([r["length"] for r in single], [1e3 * r["tpot_s"] for r in single], **look)
        longest = sorted((r for r in runs if r["length"] == max(x["length"] for x in runs)), key=lambda r: r["batch"])
        by_batch.plot([r["batch"] for r in longest], [r["tokens_per_s"] for r in longest], **look)
    by_length.set(xscale="log", xlabel="context, tokens", ylabel="time per output token, ms", ylim=(0, None))
    by_batch.set(xlabel="batch, rows", ylabel="tokens a second", ylim=(0, None))
    by_length.legend(fontsize=7)
    figure.savefig(path, dpi=130)
