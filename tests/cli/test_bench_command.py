"""kvthaw bench."""

from __future__ import annotations

from pathlib import Path

from said import Said, refused


def test_a_model_of_ones_own_is_timed_and_a_sentence_says_what_to_do(model: str, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("Alice was beginning to get very tired. " * 30)
    asked = ("bench", "decode", "--model", model, "--new-tokens", "4")
    said = Said(*asked, "--file", str(tmp_path / "book.txt"), "--method", "quest", "--budget", "64", "--device", "cpu")
    assert said.code == 0
    assert said.out.splitlines()[-1].startswith("At ")
    assert "on this CPU" in said.out
    assert "as full" in said.out
    assert model not in said.out
    refused(Said(*asked, "--length", "4q"), 2, "'4q'", "--length")
    refused(Said("bench", "decode", "--device", "meta"), 1, "device is 'meta'")
