"""Tables of summaries for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvthaw.evaluate.results import Summary

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
    samples = " / ".join(dict.fromkeys(str(row.n) for row in summaries))
    made = Table(
        title=f"{first.task}: {samples} samples, question {first.question}, {first.model} in {first.dtype} on {first.device}",
        box=SIMPLE_HEAD,
    )
    for name in _COLUMNS:
        made.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    length = first.length
    for row in summaries:
        if row.length != length:
            made.add_section()
            length = row.length
        low, high = row.accuracy_95
        made.add_row(
            f"{row.length:,}",
            row.method,
            "-" if row.budget is None else str(row.budget),
            str(row.dense_layers),
            percent(row.accuracy),
            percent(row.full_accuracy),
            f"{100 * low:.0f}-{100 * high:.0f}",
            "all" if row.attended_mean is None else f"{row.attended_mean:.0f}",
            percent(row.attention_mass),
            percent(row.recall_at_k),
            percent(row.hit_rate),
            mebibytes(row.kv_device_bytes),
            mebibytes(row.kv_host_bytes),
            "-" if row.ttft_s is None else f"{row.ttft_s:.2f}",
            "-" if row.tpot_s is None else f"{1000 * row.tpot_s:.1f}",
        )
    return made


def percent(value: float | None) -> str:
    """A share with one digit, without the sign."""
    return "-" if value is None else f"{100 * value:.1f}"


def mebibytes(count: int) -> str:
    """Bytes in MiB."""
    return f"{count / 2**20:.1f}"
