"""Tables of prefills and of running batches for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from kvthaw.evaluate.report import Cell, by_column, value
from kvthaw.evaluate.results import Record


def prefill(records: Sequence[Record]) -> Table:
    """Seconds and device memory of prompts."""
    first = records[0]

    def chunk(record: Record) -> str:
        return "one pass" if record["chunk"] >= record["length"] else f"{record['chunk']:,}"

    def peak(record: Record) -> str:
        bytes_ = record["peak_device_bytes"]
        return "-" if bytes_ is None else f"{(bytes_ - record['weight_bytes']) / 2**20:,.0f}"

    columns: dict[str, Cell] = {
        "method": value("method"),
        "length": value("length", "{:,}"),
        "chunk": chunk,
        "seconds s": value("seconds", "{:.3f}", none="does not fit"),
        "indexed s": value("indexed_s", "{:.3f}"),
        "tt2t s": value("tt2t_s", "{:.3f}"),
        "cold s": value("cold_s", "{:.3f}"),
        "device MiB\nbeside weights": peak,
    }
    return by_column(f"prefill, {first['shape']}, {first['device']}", records, columns)


def serving(records: Sequence[Record]) -> Table:
    """Times of steps and joins."""
    one = records[0]
    columns: dict[str, Cell] = {
        "method": value("method"),
        "step p50": value("step_ms_p50", "{:.1f} ms"),
        "mean": value("step_ms_mean", "{:.1f} ms"),
        "p95": value("step_ms_p95", "{:.1f} ms"),
        "most": value("step_ms_max", "{:.1f} ms"),
        "join": value("join_s_p50", "{:.2f} s"),
        "tokens/s": value("tokens_per_s", "{:.1f}"),
        "captures": value("captures"),
    }
    title = f"serving: {one['shape']}, {one['length']:,} tokens, {one['max_seqs']} sequences"
    return by_column(title, records, columns)
