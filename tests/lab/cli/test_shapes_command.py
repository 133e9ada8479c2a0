"""python -m lab bench."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lab.__main__ import app
from said import Said, refused


def test_bench_refuses_what_it_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(Said("bench", "decode", "--length", "4q", app=app), 2, "'4q'", "--length")
    refused(Said("bench", "decode", "--shape", "tiny7", app=app), 1, "shape is 'tiny7'", "llama-3.1-8b")
    refused(Said("bench", "decode", "--plot", "nowhere/a.png", app=app), 1, "folder does not exist")
    monkeypatch.setattr(os, "access", lambda path, how: not (path == tmp_path and how == os.W_OK))  # as a read-only folder
    refused(Said("bench", "decode", "--plot", str(tmp_path / "a.png"), app=app), 1, "cannot be written to")
    refused(Said("bench", "prefill", "--method", "icecach"), 1, "did you mean 'icecache'")


@pytest.mark.usefixtures("small")
def test_bench_decode_prints_lines_or_a_table(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    options = ["--method", "full,quest", "--budget", "64", "--length", "256", "--new-tokens", "8", "--out", str(out)]
    said = Said("bench", "decode", *options, "--json", app=app)
    assert said.code == 0
    assert said.records == [json.loads(line) for line in out.read_text().splitlines()]
    assert [(record["setting"]["method"], record["setting"]["budget"]) for record in said.records] == [
        ("full", None),
        ("quest", 64),
    ]
    table = Said("bench", "decode", *options, columns=80, app=app)  # nothing is measured again
    assert out.read_text().count("\n") == 2
    assert "quest, 64" in table.out
    assert all(part in table.out for part in ("ms/token", "hits", "bus MB", "of full", "256 tokens, 1 sequence"))
    assert table.out.count("quest, 64") == 2, "two tables that fit"
    assert max(map(len, table.out.splitlines()[1:])) <= 80
    plot = ("--length", "100", "--new-tokens", "4", "--plot", str(tmp_path / "a.png"))
    assert Said("bench", "decode", *options[:2], *plot, app=app).code == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("small")
def test_bench_prefill_prints_lines_or_a_table(tmp_path: Path) -> None:
    options = ["--length", "120", "--chunk", "50", "--method", "quest", "--budget", "64", "--out", str(tmp_path / "out.jsonl")]
    said = Said("bench", "prefill", *options, "--json")
    assert [(one["setting"]["method"], one["setting"]["chunk"]) for one in said.records] == [
        ("hf-dynamic", 120),
        ("quest", 120),
        ("quest", 50),
    ]
    assert "one pass" in Said("bench", "prefill", *options).out


@pytest.mark.usefixtures("small")
def test_bench_serving_shows_steps(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    some = ("bench", "serving", "--max-seqs", "2", "--requests", "3", "--length", "40", "--method", "full", "--out", str(out))
    said = Said(*some, "--new-tokens", "16")
    assert said.code == 0
    assert "tokens/s" in said.out
    assert [json.loads(line)["setting"]["method"] for line in out.read_text().splitlines()] == ["full"]
    refused(Said(*some, "--new-tokens", "3"), 1, "none had all 2 places busy")
