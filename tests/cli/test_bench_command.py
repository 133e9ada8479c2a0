"""kvthaw bench."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from said import Said, refused


def test_bench_refuses_what_it_cannot_read() -> None:
    refused(Said("bench", "decode", "--length", "4q"), 2, "'4q'", "--length")
    refused(Said("bench", "decode", "--shape", "tiny7"), 1, "shape is 'tiny7'", "llama-3.1-8b")
    refused(Said("bench", "prefill", "--method", "icecach"), 1, "did you mean 'icecache'")


@pytest.mark.usefixtures("small")
def test_bench_decode_prints_lines_or_a_table(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    options = ["--method", "full,quest", "--budget", "64", "--length", "256", "--new-tokens", "8", "--out", str(out)]
    said = Said("bench", "decode", *options, "--json")
    assert said.code == 0
    assert said.records == [json.loads(line) for line in out.read_text().splitlines()]
    assert [(record["setting"]["method"], record["setting"]["budget"]) for record in said.records] == [
        ("full", None),
        ("quest", 64),
    ]
    table = Said("bench", "decode", *options, columns=80)  # nothing is measured again
    assert out.read_text().count("\n") == 2
    assert "quest, 64" in table.out
    assert all(part in table.out for part in ("ms/token", "hits", "bus MB", "of full", "256 tokens, 1 sequence"))
    assert table.out.count("quest, 64") == 2, "two tables that fit"
    assert max(map(len, table.out.splitlines()[1:])) <= 80


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


def test_a_model_of_ones_own_is_timed_and_a_sentence_says_what_to_do(model: str, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("Alice was beginning to get very tired. " * 30)
    asked = ("bench", "decode", "--model", model, "--new-tokens", "4")
    said = Said(*asked, "--file", str(tmp_path / "book.txt"), "--method", "quest", "--budget", "64", "--device", "cpu")
    assert said.code == 0
    assert said.out.splitlines()[-1].startswith("At ")
    assert "on this CPU" in said.out
    assert "as full" in said.out
    assert model not in said.out
    refused(Said(*asked, "--tp", "2"), 2, "--tp", "--shape")
    refused(Said("bench", "decode", "--file", __file__), 2, "--file", "--model")
    refused(Said("bench", "decode", "--device", "meta"), 1, "device is 'meta'")
