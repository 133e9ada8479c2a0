"""kvthaw eval agreement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvthaw.evaluate.files import read_asset
from said import Said, refused


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(read_asset("book.txt")[:3000])
    return path


def test_windows_of_a_file_are_followed_by_the_text(model: str, book: Path, tmp_path: Path) -> None:
    arguments = ["eval", "agreement", "--model", model, "--file", str(book), "--method", "streaming", "--budget", "64"]
    arguments += ["--length", "200,300", "--limit", "2", "--tokens", "3", "--out", str(tmp_path / "out.jsonl")]
    streaming, full = Said(*arguments, "--json").records
    assert (streaming["method"], streaming["budget"], streaming["n"], streaming["answer"]) == ("streaming", 64, 4, "text")
    assert (streaming["lengths"], streaming["tokens"]) == ([200, 300], 12)
    assert (full["kl"], full["same_top"]) == (0.0, 1.0)
    table = Said(*arguments)
    words = (
        "KL(full || method)",
        "streaming",
        "full",
        "text that follows",
        "4 prompts",
        "99 % of full attention's next tokens",
    )
    assert all(word in " ".join(table.out.split()) for word in words)


def test_a_short_text_needs_no_length(model: str, book: Path) -> None:
    book.write_text(book.read_text()[:1200])
    arguments = ["eval", "agreement", "--model", model, "--file", str(book), "--method", "streaming", "--budget", "64"]
    streaming, _ = Said(*arguments, "--tokens", "3", "--json").records
    assert streaming["n"] == 4
    (length,) = streaming["lengths"]
    assert 100 < length < 1200
    said = Said(*arguments, "--tokens", "3", "--method", "icecache-digest-device", columns=80)
    table = said.out
    assert max(len(line) for line in table.splitlines() if "streaming" in line and "0." in line) <= 80
    assert [line.split()[0] for line in table.splitlines() if "0." in line and "prompts" not in line].count("streaming") == 1
    assert "covers all" not in said.err
    assert "a budget of 5,000 covers all of these prompts" in Said(*arguments, "--budget", "5000,6000").err
    refused(Said(*arguments, "--length", "9000"), 1, "the text has", "9,000", "smaller length")


def test_prompts_and_questions_are_answered_greedily(model: str, book: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": read_asset("book.txt")[:600]}) + "\n")
    common = ["eval", "agreement", "--model", model, "--method", "streaming", "--budget", "64", "--tokens", "3", "--json"]
    (one, _) = Said(*common, "--prompts", str(prompts), "--length", "100").records
    assert (one["answer"], one["n"], one["lengths"], one["kl_95"]) == ("greedy", 1, [100], None)
    (one, _) = Said(*common, "--file", str(book), "--question", "Who?", "--length", "150", "--limit", "2").records
    assert (one["answer"], one["n"]) == ("greedy", 2)


def test_what_is_asked_wrongly(model: str, book: Path) -> None:
    refused(Said("eval", "agreement"), 2, "--file", "--prompts")
    refused(Said("eval", "agreement", "--file", str(book), "--prompts", str(book)), 2, "one of")
    refused(Said("eval", "agreement", "--prompts", str(book), "--question", "Who?"), 2, "--question")
    refused(Said("eval", "agreement", "--prompts", str(book), "--length", "100,200"), 2, "one number")
    refused(Said("eval", "agreement", "--model", model, "--file", str(book), "--length", "1000k"), 1, "the text has")
