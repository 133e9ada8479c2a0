"""Timing prompts in chunks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvthaw.bench import prefill
from kvthaw.bench.asked import Prefill
from kvthaw.bench.prefill import HF, Setting, floor, main
from kvthaw.bench.shapes import build
from kvthaw.errors import CacheError, ConfigError
from kvthaw.kernels import dense


def test_lines_are_kept_and_not_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = Prefill(length=(200,), chunk=(80, 400), method=("icecache", "full"), budget=64, out=tmp_path / "lines.jsonl")
    lines = main(asked)
    assert [(line.setting.method, line.setting.chunk) for line in lines] == [
        (HF, 200),
        ("icecache", 200),
        ("icecache", 80),
        ("full", 200),
        ("full", 80),
    ]
    assert all(line.cold_s and line.indexed_s and line.seconds and line.indexed_s >= line.seconds > 0 for line in lines)
    row = 4 * 2 * 2 * 64 * 4  # layers, K and V, KV heads, head_dim, float32
    assert [(line.bytes_to_host, line.bytes_back) for line in lines[:3]] == [(0, 0), (200 * row, 0), (200 * row, 240 * row)]
    (half,) = main(Prefill(length=(200,), chunk=(80,), method=("icecache",), budget=64, chunks_only=True, layers=2))
    assert (half.bytes_to_host, half.bytes_back) == (100 * row, 120 * row)
    assert half.setting.key() != lines[2].setting.key()
    monkeypatch.setattr(prefill, "measure", None)
    assert main(asked) == lines
    with pytest.raises(ConfigError, match="layers is 5; tiny has 1 to 4"):
        main(Prefill(layers=5, chunks_only=True))


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier tokens left out."""
    monkeypatch.setattr(dense, "merge_into", lambda *_: None)
    with pytest.raises(CacheError, match=r"icecache in chunks differs from one pass by [01]\."):
        main(Prefill(length=(200,), chunk=(80,), chunks_only=True))


def test_bad_settings() -> None:
    with pytest.raises(ConfigError, match="chunk is 0; it must be at least 1"):
        main(Prefill(chunk=(0,)))
    with pytest.raises(ConfigError, match="did you mean 'icecache'"):
        main(Prefill(method=("icecach",)))


def test_floor_of_an_8b_model() -> None:
    """128k tokens: 1.83 PFLOP of products and 4.5 of attention; 64k past tokens in the mean of 8 chunks come back."""
    with torch.device("meta"):
        model = build("llama-3.1-8b", torch.device("meta"))
    sizes = {"budget": 64, "retrieved": None, "dense_layers": 0, "device": "H200"}
    one = Setting(shape="llama-3.1-8b", method="icecache", length=131072, chunk=16384, **sizes)
    least = floor(model.to(torch.bfloat16), one)
    assert least["compute"] == pytest.approx(1.83e15 / 795e12 + 4.504e15 / 660e12, rel=2e-3)
    assert (least["to_host"], least["back"]) == (131072 * 131072, 28 * 16384 * 131072)
    assert least["all"] == least["compute"]
