"""kvthaw inspect."""

from __future__ import annotations

from pathlib import Path

from said import Said, refused


def test_it_writes_a_page(model: str, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("Down the rabbit hole. " * 20)
    page = tmp_path / "page.html"
    said = Said(
        *("inspect", "--model", model, "--file", str(tmp_path / "book.txt"), "--question", "Who?", "-o", str(page)),
        *("--method", "quest", "--method", "pariskv", "--budget", "64", "--max-new-tokens", "3", "--no-exact"),
    )
    assert said.code == 0, said.err
    assert "Down the rabbit hole." in page.read_text()
    assert "pariskv, budget 64" in page.read_text()


def test_too_many_runs_cost_no_loading(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("text")
    files = ["--file", str(tmp_path / "book.txt"), "-o", str(tmp_path / "page.html")]
    refused(Said("inspect", *files, "--question", "Who?", "--budget", "64,65,66,67,68"), 1, "5", "4")
