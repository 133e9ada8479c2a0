"""Timing prompts in chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvthaw.errors import CacheError, ConfigError
from kvthaw.evaluate.results import Record, ResultsFile
from kvthaw.kernels import dense
from lab.bench import prefill
from lab.bench.prefill import HF, grid, run


def measured(out: Path | None = None, methods: tuple[str, ...] = ("icecache-digest",), **asked: Any) -> list[Record]:
    return run(grid("tiny", methods, [200], asked.pop("chunks", [80]), budget=64, **asked), ResultsFile(out))


def test_records_are_kept_and_not_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"out": tmp_path / "lines.jsonl", "methods": ("icecache-digest", "full"), "chunks": [80, 400]}
    records = measured(**asked)
    assert [(one["method"], one["chunk"]) for one in records] == [
        (HF, 200),
        ("icecache-digest", 200),
        ("icecache-digest", 80),
        ("full", 200),
        ("full", 80),
    ]
    assert all(one["cold_s"] and one["tt2t_s"] > one["indexed_s"] >= one["seconds"] > 0 for one in records)
    assert [bool(one["index_alone_s"]) for one in records] == [False, True, True, False, False]
    (half,) = measured(chunks_only=True, layers=2)
    assert half.key != records[2].key
    monkeypatch.setattr(prefill, "measure", None)
    assert measured(**asked) == records
    with pytest.raises(ConfigError, match="layers is 5; tiny has 1 to 4"):
        measured(layers=5, chunks_only=True)


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier tokens left out."""
    monkeypatch.setattr(dense, "merge_parts", lambda parts, _: parts[0])
    with pytest.raises(CacheError, match=r"icecache-digest in chunks differs from one pass by [01]\."):
        measured(chunks_only=True)


def test_bad_settings() -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        measured(chunks=[0])
    with pytest.raises(ConfigError, match="did you mean 'icecache"):
        measured(methods=("icecach",))
