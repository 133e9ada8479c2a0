"""The tables of speed from committed lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab.script import END

ROOT = Path(__file__).parents[2]

pytest.importorskip("matplotlib")


@pytest.fixture
def speed() -> Any:
    """The script, as a module."""
    from lab import speed

    return speed


def test_the_page_says_what_the_lines_say(speed: Any) -> None:
    for page, said in ((speed.PAGE, speed.part()), (speed.SHORT, speed.summary())):
        assert page.read_text().partition(speed.MARK)[2].partition(END)[0].strip() == said


def test_newer_lines_take_the_place_of_older_ones(speed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = speed.read(ROOT / "lab" / "results" / "decode.jsonl")
    first = next(
        line
        for line in lines
        if speed.matches(line, {"method": "pariskv-plus", "length": 131072, "steps": "captured", "batch": 1})
    )
    newer = json.loads(json.dumps(first)) | {"tpot_s": 0.00123, "about": {**first["about"], "commit": "newer"}}
    newer["setting"] |= {"new_tokens": 512, "shared": True}
    (tmp_path / "results").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "results" / "decode.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "out" / "decode.jsonl").write_text(json.dumps(newer) + '\n{"setting": {"sha')
    monkeypatch.setattr(speed, "HERE", tmp_path)
    speed.collect(tmp_path / "out")
    kept = speed.read(tmp_path / "results" / "decode.jsonl")
    assert len(kept) == len(lines)
    assert kept[-1] == newer
    assert first not in kept
    median, high = (f"{1e3 * first[name]:.1f}" for name in ("itl_p50_s", "itl_p95_s"))
    assert f"**1.2 ({median}, {high})**" in speed.part()
    assert "128k, 512k, 1M layers share" in speed.part()


def test_peaks_are_told_beside_full_attentions_best(speed: Any) -> None:
    setting = {"device": "NVIDIA H200", "length": 32768}
    times = {"mean_ms": 10.0, "median_ms": 9.0, "about": {"commit": "abc"}}
    lines = [
        {"setting": setting | {"method": "full", "seqs": 27}, "tokens_per_s": 800.0, "device_rate": None, **times},
        {"setting": setting | {"method": "full", "seqs": 28}, "error": "out of memory", "about": {"commit": "abc"}},
        {
            "setting": setting | {"method": "quest", "kv_dtype": "fp8", "seqs": 44},
            "tokens_per_s": 2000.0,
            "device_rate": 0.5,
            **times,
        },
    ]
    _, table = speed.peaks(lines)
    assert "quest, fp8 rows (50 % of its rows on the device) | 32k | 44 | 10.0 (9.0) | 2,000 | 2.50" in table
    assert "full | 32k | 27 | 10.0 (9.0) | 800 | 1.00" in table
    assert "28" not in table
    assert list(speed.peaks([])) == []


def test_another_gpu_has_a_table_of_its_own(speed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = speed.read(ROOT / "lab" / "results" / "decode.jsonl")
    before = speed.part()
    other = next(
        line
        for line in lines
        if speed.matches(line, {"method": "pariskv-plus", "length": 131072, "steps": "captured", "batch": 1})
    )
    other = {**other, "tpot_s": 0.00123, "setting": {**other["setting"], "device": "NVIDIA A100"}}
    (tmp_path / "results").mkdir()
    for path in (ROOT / "lab" / "results").iterdir():
        (tmp_path / "results" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "results" / "decode.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (*lines, other)))
    monkeypatch.setattr(speed, "HERE", tmp_path)
    median, high = (f"{1e3 * other[name]:.1f}" for name in ("itl_p50_s", "itl_p95_s"))
    own = speed.part()
    table = own[own.index("NVIDIA A100, mean (median, 95th percentile) milliseconds a token") :]
    assert f"| pariskv-plus, 100 retrieved | 1.2 ({median}, {high}) |" in table, "alone in its column, so not the fastest"
    assert [part for part in own.split("\n\n") if part not in before.split("\n\n")] == table.split("\n\n")[:2]


def test_lines_without_dense_layers_answer_where_they_are_asked_for(speed: Any) -> None:
    wanted = {"method": "pariskv-plus", "retrieved": 100, "length": 131072, "prompt": "filled"}
    usual = speed.best(speed.read(ROOT / "lab" / "results" / "decode.jsonl"), **wanted)
    without = {**usual, "setting": {**usual["setting"], "dense_layers": 0}}
    assert speed.best([usual, without], **wanted) is usual
    assert speed.best([usual, without], **wanted, dense_layers=0) is without
