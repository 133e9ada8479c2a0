"""Records of the benchmarks as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from kvthaw.bench.settings import label
from kvthaw.evaluate.report import Cell, by_column, value
from kvthaw.evaluate.results import Record
from kvthaw.formatting import counted


def decode(records: Sequence[Record]) -> list[Table]:
    """Return two tables: times, and where the KV lies. Values that are equal in all records are in the title."""
    first = records[0]

    def held(record: Record) -> str:
        parts = ("kv_device_bytes", "index_device_bytes", "kv_dense_bytes")
        return f"{sum(record[name] for name in parts) / 2**20:,.1f}"

    settings = {"tokens": "length", "rows": "batch", "steps": "steps"}
    own = {name: field for name, field in settings.items() if len({record[field] for record in records}) > 1}
    rows = counted(first["batch"], "sequence")
    shared = {"tokens": f"{first['length']:,} tokens", "rows": rows, "steps": f"{first['steps']} steps"}
    names: dict[str, Cell] = {"method": label} | {
        name: value(field, "{}" if name == "steps" else "{:,}") for name, field in own.items()
    }
    times: dict[str, Cell] = {
        "first s": value("ttft_s", "{:.3f}"),
        "ms/token": value("tpot_s", "{:.2f}", 1e3),
        "p95 ms": value("itl_p95_s", "{:.2f}", 1e3),
        "tokens/s": value("tokens_per_s", "{:.1f}"),
        **({"as full": value("agreement", "{:.0%}")} if "agreement" in first.measures else {}),
    }
    places: dict[str, Cell] = {
        "device MiB": held,
        "of full": value("share_with_dense", "{:.1%}"),
        "host MiB": value("kv_host_bytes", "{:,.1f}", 2**-20),
        "hits": value("hit_rate", "{:.0%}", none=""),
        "bus MB": value("bus_bytes", "{:.2f}", 1e-6),
    }
    commit = first["about"].get("commit")
    about = [first["shape"], first["device"], *(said for name, said in shared.items() if name not in own)]
    title = ", ".join(["decode", *about, *([f"commit {commit}"] if commit else [])])
    words = ("method", "steps")
    where = "KV and index; hits: selected rows that were on the device; bus: MB per token"
    return [by_column(title, records, names | times, words=words), by_column(where, records, names | places, words=words)]
