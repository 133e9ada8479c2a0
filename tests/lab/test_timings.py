"""Timings of one process, on what is here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("matplotlib")

from lab import timings


@pytest.mark.usefixtures("small")
def test_jobs_are_done_in_order_while_there_is_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = {what: (0, what, of) for _, what, of in reversed(timings.JOBS) if what != "kernels"}  # the first of each
    monkeypatch.setattr(timings, "JOBS", (*kinds.values(), (1000, "rival", ("full", 128, 64))))
    asked = ["--out", str(tmp_path), "--commit", "abc", "--seconds", "500", "--shape", "tiny", "--shrink", "64"]
    monkeypatch.setattr(sys, "argv", ["timings", *asked])
    timings.main()
    lines = {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in tmp_path.glob("*.jsonl")}
    assert {name: len(found) for name, found in lines.items()} == {"decode": 1, "rivals": 1, "prefill": 1}
    assert lines["rivals"][0]["off"] == 0
    assert lines["decode"][0]["setting"]["length"] == lines["prefill"][0]["setting"]["length"] == 2048
    assert all(
        timing > 0 for timing in (lines["decode"][0]["tpot_s"], lines["rivals"][0]["ms"], lines["prefill"][0]["indexed_s"])
    )
    assert lines["prefill"][0]["over_floor"] > 1
    noted = capsys.readouterr().err
    assert "Traceback" not in noted
    assert noted.splitlines()[-1].endswith("rival full, 128, 64 is left out")


def test_every_job_is_one_that_there_is() -> None:
    for seconds, what, of in timings.JOBS:
        assert seconds > 0
        assert of
        assert callable(getattr(timings.Timings, what))
