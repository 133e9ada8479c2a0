"""What kvthaw serve refuses before it serves."""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path

import pytest
from typer import BadParameter

import kvthaw.serve
from kvthaw.cli.serve import _contexts, _keys
from kvthaw.errors import ConfigError
from said import Said, refused


def test_without_its_packages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvthaw, "serve", kvthaw.serve)  # another one is imported
    for name in [name for name in sys.modules if name.startswith("kvthaw.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    refused(Said("serve"), 1, "pip install kvthaw[serve]")


def test_wrong_options_cost_no_loading(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\n \n")
    refused(Said("serve", "--api-key-file", str(tmp_path / "keys")), 1, "keys is empty")
    refused(Said("serve", "--method", "icecach"), 1, "icecache")
    refused(Said("serve", "--host-memory", "much"), 1, "--host-memory", "much")
    refused(Said("serve", "--port", "70000"), 2, "port")


def test_an_address_that_is_taken() -> None:
    from kvthaw.serve.protocol import listen

    with listen("127.0.0.1", 0) as taken:
        refused(Said("serve", "--port", str(taken.getsockname()[1]), columns=300), 1, "in use", "--port 0")


def test_a_fraction_is_no_budget_of_a_server(model: str) -> None:
    refused(Said("serve", model, "--port", "0", "--budget", "0.1"), 1, "budget", "0.1")


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of texts with everyday names, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("my book.txt", "книга.txt", ".notes", "a/notes.txt", "b/notes.txt", "one=two.txt", "Äpfel & Birnen.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"The text of {name}.")
    return tmp_path


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["a/notes.txt"], ["notes"]),
        (["book=my book.txt", "b=b/notes.txt", "a/notes.txt"], ["book", "b", "notes"]),
        (["pairs=one=two.txt"], ["pairs"]),
        (["книга-1=a/notes.txt"], None),
        (["two=two.txt"], None),
        (["a"], None),
        (["a="], None),
    ],
)
def test_a_context_has_the_name_of_its_file_or_its_own(texts: Path, given: list[str], named: list[str] | None) -> None:
    if named is None:
        with pytest.raises((ConfigError, BadParameter)):
            _contexts(given)
    else:
        assert list(_contexts(given)) == named


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("my book.txt", "my-book"),
        ("книга.txt", "NAME"),
        (".notes", "notes"),
        ("one=two.txt", "one-two"),
        ("Äpfel & Birnen.md", "Apfel-Birnen"),
    ],
)
def test_a_file_whose_name_no_request_can_give_is_refused_with_a_better_one(texts: Path, name: str, better: str) -> None:
    refused(Said("serve", "--context", name, columns=400), 1, "--context", repr(name), f"'{better}={name}'")
    if better != "NAME":
        assert list(_contexts([f"{better}={name}"])) == [better]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("doc=", ("'doc='", "names no file after '='", "doc=FILE")),
        ("doc=nowhere.txt", ("'doc=nowhere.txt'", "'nowhere.txt'", "there is no file")),
        ("nowhere", ("'nowhere'", "there is no file", "FILE or NAME=FILE")),
        ("doc=a", ("'doc=a'", "'a'", "is a folder")),
        ("a", ("'a'", "is a folder")),
    ],
)
def test_what_names_no_file_is_refused_with_what_is_allowed(texts: Path, given: str, words: tuple[str, ...]) -> None:
    refused(Said("serve", "--context", given, columns=400), 2, "--context", *words)


def test_no_text_takes_the_name_of_another(texts: Path) -> None:
    same = ("--context", "a/notes.txt", "--context", "b/notes.txt")
    refused(Said("serve", *same, columns=400), 1, "a/notes.txt", "b/notes.txt", "'notes'", "NAME=FILE")
    refused(
        Said("serve", "--context", "x=a/notes.txt", "--context", "x=b/notes.txt", columns=400), 1, "a/notes.txt", "b/notes.txt"
    )


def test_a_key_file_has_keys_and_comments(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\none\n\n  two # 2 \n#three\n")
    assert _keys(file) == ("one", "two # 2")
    file.write_text("# nothing yet\n\n")
    with pytest.raises(ConfigError, match="no key"):
        _keys(file)


def test_what_is_served_is_said_and_logged(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "book.txt").write_text("The sky is blue.")
    server = importlib.import_module("kvthaw.serve.server")
    monkeypatch.setattr(server, "run", lambda *_, **__: logging.getLogger("kvthaw.serve").info("a line"))
    log = logging.getLogger("kvthaw")
    monkeypatch.setattr(log, "handlers", [])
    level = log.level
    common = ("serve", model, "--port", "0", "--max-len", "512", "--method", "quest", "--budget", "64", "--max-seqs", "2")
    try:
        said = Said(*common, "--context", str(tmp_path / "book.txt"), columns=300)
        assert said.code == 0, said.err
        for words in (
            "a page at /",
            "quest, budget 64, 512 tokens a request, 2 decoded at once",
            "book (16 tokens)",
            "INFO a line",
        ):
            assert words in said.err
        monkeypatch.setattr(log, "handlers", [])
        assert "a line" not in Said(*common, "--log-level", "warning").err
    finally:
        log.setLevel(level)
