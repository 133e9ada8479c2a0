"""Records of the benchmarks as tables for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from kvthaw.evaluate.plot import label
from kvthaw.evaluate.report import lay_out
from kvthaw.evaluate.results import Record

Column = tuple[str, Callable[[Record], str]]


def _table(title: str, records: Sequence[Record], columns: Sequence[Column], *, words: int = 1) -> Table:
    """One row a record; the first columns are words, the others numbers."""
    names = [name for name, _ in columns]
    return lay_out(title, names, [[cell(record) for _, cell in columns] for record in records], words=names[:words])


def _known(name: str, form: str, times: float = 1) -> Callable[[Record], str]:
    def cell(record: Record) -> str:
        value: Any = record[name]
        return "-" if value is None else form.format(value * times)

    return cell


def decode(records: Sequence[Record]) -> Table:
    """Times, bytes on the device and hit rates."""
    first = records[0]

    def held(record: Record) -> str:
        parts = ("kv_device_bytes", "index_device_bytes", "kv_dense_bytes")
        return f"{sum(record[name] for name in parts) / 2**20:,.1f} MiB"

    columns: list[Column] = [
        ("method", label),
        ("steps", lambda record: str(record["steps"])),
        ("tokens", _known("length", "{:,}")),
        ("rows", _known("batch", "{}")),
        ("TTFT s", _known("ttft_s", "{:.3f}")),
        ("TT2T s", _known("tt2t_s", "{:.3f}")),
        ("TPOT ms", _known("tpot_s", "{:.2f}", 1e3)),
        ("p50 ms", _known("itl_p50_s", "{:.2f}", 1e3)),
        ("p95 ms", _known("itl_p95_s", "{:.2f}", 1e3)),
        ("tokens/s", _known("tokens_per_s", "{:.1f}")),
        *([("as full", _known("agreement", "{:.0%}"))] if "agreement" in first.measures else []),
        ("hits", _known("hit_rate", "{:.0%}")),
        ("bus MB", _known("bus_bytes", "{:.2f}", 1e-6)),
        ("KV + index", held),
        ("of full", _known("share_with_dense", "{:.1%}")),
        ("host MiB", _known("kv_host_bytes", "{:,.1f}", 2**-20)),
        ("captures", _known("captures", "{}")),
    ]
    commit = first["about"].get("commit")
    title = f"decode, {first['shape']}, {first['device']}" + (f", commit {commit}" if commit else "")
    return _table(title, records, columns, words=2)


def prefill(records: Sequence[Record]) -> Table:
    """Seconds and device memory of prompts."""
    first = records[0]

    def chunk(record: Record) -> str:
        return "one pass" if record["chunk"] >= record["length"] else f"{record['chunk']:,}"

    def peak(record: Record) -> str:
        bytes_ = record["peak_device_bytes"]
        return "-" if bytes_ is None else f"{(bytes_ - record['weight_bytes']) / 2**20:,.0f}"

    def seconds(name: str) -> Callable[[Record], str]:
        def cell(record: Record) -> str:
            value = record.measures.get(name)  # records of before the second token was timed have none
            return "does not fit" if record["seconds"] is None else "-" if value is None else f"{value:.3f}"

        return cell

    columns: list[Column] = [
        ("method", lambda record: str(record["method"])),
        ("length", _known("length", "{:,}")),
        ("chunk", chunk),
        *((f"{name.removesuffix('_s')} s", seconds(name)) for name in ("seconds", "indexed_s", "tt2t_s", "cold_s")),
        ("device MiB\nbeside weights", peak),
    ]
    return _table(f"prefill, {first['shape']}, {first['device']}", records, columns)


def serving(records: Sequence[Record]) -> Table:
    """Times of steps and joins."""
    one = records[0]
    columns: list[Column] = [
        ("method", lambda record: str(record["method"])),
        *((name, _known(f"step_ms_{of}", "{:.1f} ms")) for name, of in _STEPS.items()),
        ("join", _known("join_s_p50", "{:.2f} s")),
        ("tokens/s", _known("tokens_per_s", "{:.1f}")),
        ("captures", _known("captures", "{}")),
    ]
    return _table(f"serving: {one['shape']}, {one['length']:,} tokens, {one['max_seqs']} sequences", records, columns)


_STEPS = {"step p50": "p50", "mean": "mean", "p95": "p95", "most": "max"}
