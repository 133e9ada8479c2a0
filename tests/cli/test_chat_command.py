"""kvthaw chat."""

from __future__ import annotations

import importlib
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from kvthaw.cli.chat import repeats
from kvthaw.engine.text import Detokenizer
from said import Said, refused

DOCUMENT = "Down the rabbit hole. " * 30


@pytest.fixture
def talk(endless: Path, tmp_path: Path) -> Any:
    """Runs the command on lines of input, with KV kept in a folder of the test's own."""
    (tmp_path / "book.txt").write_text(DOCUMENT)

    def run(*arguments: str, says: tuple[str, ...]) -> Said:
        common = ("--model", str(endless), "--kv-dir", str(tmp_path / "kv"), "--max-new-tokens", "5")
        return Said("chat", *common, *arguments, stdin="\n".join(says) + "\n")

    return run


def test_a_conversation_about_a_document(talk: Any, tmp_path: Path) -> None:
    page, sparse = tmp_path / "page.html", ("--method", "oracle", "--budget", "64")
    file = ("--file", str(tmp_path / "book.txt"))
    said = talk(*file, *sparse, says=("Who?", "/recalled 2", f"/recalled {page}", "/stats", "Why?", "/save talk", "/quit", "x"))
    assert said.code == 0, said.err
    assert "no chat template" in said.err
    assert f"{len(DOCUMENT) - 1:,} tokens\n" in said.err, "without the last blank"
    assert re.search(r"First token after .* \(prompt: 5 tokens; [\d,]+ were there already\)", said.err)
    assert " %  tokens " in said.out
    assert ": each step read " in said.err
    assert "Down the rabbit hole." in page.read_text()
    again = talk("--context", "talk", *sparse, says=("And now?",))
    assert "4 messages" in again.err
    assert again.code == 0
    prefilled = re.search(r"prompt: ([\d,]+) tokens", again.err)
    assert prefilled is not None
    assert int(prefilled[1].replace(",", "")) < 30, "the question, and what is no text at the end of an answer"


def test_a_document_is_prefilled_once(talk: Any, tmp_path: Path) -> None:
    file = ("--file", str(tmp_path / "book.txt"), "--context", "book")
    first, again, named = talk(*file, says=("Who?",)), talk(*file, says=("Who?",)), talk("--context", "book", says=("Who?",))
    assert f"{len(DOCUMENT) - 2:,} of them kept before" in again.err
    assert first.out == again.out == named.out
    refused(talk("--context", "nothing", says=("Who?",)), 1, "nothing", "--file")
    refused(talk("--context", "../up", says=("Who?",)), 1, "../up")


def test_what_is_kept_has_a_name_that_a_server_can_serve(talk: Any, tmp_path: Path) -> None:
    said = talk(says=("/save my talk", "/save Gespräch", "/save -", "/save a@b"))
    assert said.err.count("/save: NAME is") == 4
    assert all(better in said.err for better in ("'my-talk'", "'Gesprach'", "'a-b'"))
    assert not (tmp_path / "kv").exists()
    file = ("--file", str(tmp_path / "book.txt"))
    refused(talk(*file, "--context", "my book", says=("Who?",)), 1, "--context", "'my book'", "'my-book'")
    refused(talk("--context", "", says=("Who?",)), 1, "--context", "''")
    talk(*file, "--context", "book", says=("Who?",))
    (tmp_path / "kv" / "book").rename(tmp_path / "kv" / "my book")
    assert talk("--context", "my book", says=("Who?",)).code == 0, "one that was kept so before"


def test_settings_change_within_a_conversation(talk: Any) -> None:
    said = talk(
        says=(
            "/set",
            "/set temperature 1.5",
            "/set top_k=7",
            "/set --seed 3",
            "Who?",
            "/set top-k none",
            "/set max-new-tokens 2",
            "Why?",
        )
    )
    assert said.code == 0, said.err
    assert "temperature 0, top-k off, top-p 1," in said.err
    assert "temperature 1.5, top-k 7, top-p 1, min-p 0, repetition-penalty 1, max-new-tokens 5, seed 3" in said.err
    drawn = talk("--temperature", "1.5", "--top-k", "7", "--seed", "3", says=("Who?",))
    assert said.out.startswith(drawn.out)
    assert " 2 tokens" in said.err
    wrong = talk(
        says=(
            "/set temprature 1",
            "/set temperature warm",
            "/set top-p 2",
            "/set temperature",
            "/set seed 1.5",
            "/set",
            "/set budget 512",
            "/stat",
        )
    )
    for words in (
        "'temperature'",
        "'warm' is not a number",
        "/set top-p is 2.0",
        "'' is not a number",
        "'1.5' is not a whole number",
        "start kvthaw chat with --budget 512",
        "no command is named '/stat'; did you mean '/stats'?",
    ):
        assert words in wrong.err
    assert "temperature 0, top-k off, top-p 1," in wrong.err


def test_several_methods_are_refused_with_the_command_that_takes_them(talk: Any) -> None:
    refused(talk("--method", "full,oracle", says=("Who?",)), 1, "'full,oracle'", "kvthaw generate")


def test_a_command_that_lacks_something_says_so(talk: Any) -> None:
    said = talk(says=("/save", "/recalled five", "/help"))
    assert "/save: NAME is missing" in said.err
    assert "/recalled: 'five' is neither" in said.err
    assert "/clear" in said.err


def test_what_recalled_nothing_says_why(talk: Any, tmp_path: Path) -> None:
    pages = f"/recalled {tmp_path / 'page.html'}"
    said = talk(says=("/recalled", "Who?", "/recalled", pages))
    assert said.err.count("no question was answered yet") == 1
    assert said.err.count("nothing was recalled: full attention is faster up to") == 2
    assert not (tmp_path / "page.html").exists()


def test_what_fails_ends_no_conversation(talk: Any) -> None:
    said = talk(says=("a" * 3000, "/save ../up", "/nonsense", "/recalled", "Who?"))
    assert said.code == 0
    assert "3,001 tokens" in said.err or "3,000 tokens" in said.err
    assert "'/nonsense'" in said.err, "that there is no such command"
    assert "/recalled" in said.err, "the list of commands"
    assert "Traceback" not in said.err
    assert said.out.strip()


def test_a_gpu_without_memory_left_ends_no_conversation(talk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, tokens = importlib.import_module("kvthaw.conversation"), list[int]()
    prefill = module.prefill

    def fail_once(*arguments: Any, **options: Any) -> Any:
        tokens.append(1)
        if len(tokens) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB. GPU 0 has")
        return prefill(*arguments, **options)

    monkeypatch.setattr(module, "prefill", fail_once)
    said = talk(says=("Who?", "Why?"))
    assert said.code == 0
    assert said.err.count("out of memory. Tried to allocate 1 GiB. Give") == 1
    assert said.out.strip(), "the second question's answer"


def test_ctrl_c_ends_an_answer_and_not_the_conversation(talk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    push, tokens = Detokenizer.push, list[int]()

    def third(self: Detokenizer, token: int) -> str:
        tokens.append(token)
        if len(tokens) == 3:
            signal.raise_signal(signal.SIGINT)
        return push(self, token)

    monkeypatch.setattr(Detokenizer, "push", third)
    said = talk(says=("Who?", "Why?"))
    assert said.code == 0
    assert " Stopped." in said.err
    assert len(tokens) == 3 + 5


@pytest.mark.parametrize(
    ("tokens", "loops"),
    [
        ([7] * 127, False),
        ([7] * 128, True),
        ([*range(40), *[5, 6, 7] * 43], True),
        ([*range(30)] * 5, False),
        ([*range(30)] * 6, True),
        ([*range(64)] * 6, True),
        ([*range(65)] * 9, False),
        ([*[1, 2] * 64, 3], False),
        ([], False),
    ],
)
def test_a_loop_is_a_line_that_repeats(tokens: list[int], loops: bool) -> None:
    assert repeats(tokens) is loops


def test_an_answer_that_loops_is_stopped(talk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = importlib.import_module("kvthaw.cli.chat")
    monkeypatch.setattr(chat, "repeats", lambda tokens: len(tokens) == 3)
    said = talk(says=("Hi", "/quit"))
    assert "3 tokens" in said.err
    assert "Stopped, because it repeats itself: /set repetition-penalty 1.2" in said.err


def test_a_text_that_is_too_long_may_lose_its_middle(model: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The grass is green. " * 500)
    asked = ("chat", "--model", model, "--file", str(tmp_path / "text.txt"), "--max-new-tokens", "3")
    said = Said(*asked, "--cut", stdin="Why?\n")
    assert said.code == 0
    assert "--cut leaves out" in said.err
    tokens = re.search(r"text.txt: ([\d,]+) tokens", said.err)
    assert tokens is not None
    assert 1500 < int(tokens[1].replace(",", "")) < 1900
