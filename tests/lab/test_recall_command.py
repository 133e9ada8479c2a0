"""python3 -m lab.recall."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab.recall import main

PARIS = "pariskv:window=16:buffer=16"


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    main(arguments)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_recall_prints_one_object_a_run(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "out.jsonl", tmp_path / "plot.png"
    asked = ["recall", "--model", model, "--method", f"{PARIS},quest", "--budget", "64", "--retrieved", "10", "--length", "700"]
    records = told(capsys, *asked, "--steps", "4", "--out", str(out), "--plot", str(plot))
    limits = ((64, None), (None, 10))
    assert [(r["method"], r["budget"], r["retrieved"]) for r in records] == [
        (name, *limit) for name in (PARIS, "quest") for limit in limits
    ]
    named = {"recall_at_k", "attention_mass", "mass_of_exact", "retrieved_of_exact", "output_error", "ceiling", "rows"}
    for record in records:
        assert set(record) >= named | {"layers", "bins", "kinds", "samples", "seed", "versions", "model", "length"}
        assert set(record["kinds"]) == {"text", "needle"}
        assert [layer["layer"] for layer in record["layers"]] == [0, 1]
        assert ("recall_at_10" in record) == (record["retrieved"] == 10)
        assert (record["ceiling"] is None) == (record["method"] == "quest")
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert len(out.read_text().splitlines()) == 4 * 2


def test_drift_shows_first_and_last_quarter(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "out.jsonl", tmp_path / "plot.png"
    asked = ["drift", "--model", model, "--length", "300", "--steps", "16", "--probe", "2", "--retrieved", "8"]
    records = told(
        capsys,
        *asked,
        "--method",
        f"{PARIS},{PARIS.replace('pariskv', 'pariskv-ablated')}:centroids=learned",
        "--out",
        str(out),
        "--plot",
        str(plot),
    )
    assert len(records) == len(out.read_text().splitlines()) == 2
    for record in records:
        assert (len(record["quarters"]), len(record["bins"])) == (4, 8)
        assert all(0 < part["recall_at_8"] <= 1 for part in record["quarters"])
        assert (record["eval"], record["follow"], record["steps"]) == ("drift", "text", 16)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_drift_says_whose_tokens_were_sent(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["drift", "--model", model, "--length", "99", "--steps", "4", "--probe", "2", "--method", "quest"]
    (record,) = told(capsys, *asked, "--follow", "full")
    assert (record["follow"], record["temperature"], record["retrieved"]) == ("full", 1.0, 100)
