"""kvthaw inspect."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvthaw.cli.common import write_whole
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


def test_it_prints_the_answer_of_generate(model: str, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("Down the rabbit hole. " * 20)
    asked = ("--model", model, "--file", str(tmp_path / "book.txt"), "--question", "Who went down the hole, and which way?")
    asked += ("--method", "quest", "--budget", "24", "--max-new-tokens", "12")
    inspected, generated = Said("inspect", *asked, "-o", str(tmp_path / "page.html")), Said("generate", *asked)
    assert inspected.out.rstrip("\n") == generated.out.rstrip("\n").removeprefix("> Who went down the hole, and which way?\n")


def test_too_many_runs_cost_no_loading(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("text")
    files = ["--file", str(tmp_path / "book.txt"), "-o", str(tmp_path / "page.html")]
    refused(Said("inspect", *files, "--question", "Who?", "--budget", "64,65,66,67,68"), 1, "5", "4")


def test_a_full_disk_leaves_what_stood_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.html"
    write_whole(page, "first")
    write = Path.write_text

    def half(path: Path, text: str, encoding: str) -> None:
        write(path, text[: len(text) // 2], encoding)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match=r"No space left.*page\.html"):
        write_whole(page, "second")
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "new.html", "third")
    assert page.read_text() == "first"
    assert list(tmp_path.iterdir()) == [page]


def test_a_page_may_go_to_a_device_or_a_link(tmp_path: Path) -> None:
    write_whole(Path("/dev/null"), "text")
    assert not Path("/dev/null").is_file()
    (tmp_path / "link.html").symlink_to(tmp_path / "page.html")
    write_whole(tmp_path / "link.html", "text")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "page.html").read_text() == "text"


def test_a_page_that_cannot_be_written_costs_no_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("kvthaw.cli.options.ModelOptions.load")
    (tmp_path / "book.txt").write_text("text")
    given = ["--file", str(tmp_path / "book.txt"), "--question", "Who?"]
    refused(Said("inspect", *given, "-o", str(tmp_path / "nowhere" / "page.html")), 1, "nowhere")
    refused(Said("inspect", *given, "-o", str(tmp_path)), 2, "--out")
