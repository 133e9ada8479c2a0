"""What a command says on stderr while it works, with a terminal and without one."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from rich.console import Console

from kvthaw.cli import progress
from kvthaw.evaluate.evaluator import Progress as State
from said import Said


@contextmanager
def console(monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> Iterator[io.StringIO]:
    text = io.StringIO()
    monkeypatch.setattr(progress, "stderr", lambda: Console(file=text, force_terminal=terminal, width=100))
    yield text


def until_said(text: io.StringIO, words: str, times: int = 1) -> None:
    """Wait until another thread has printed some words."""
    end = time.monotonic() + 20
    while text.getvalue().count(words) < times:
        assert time.monotonic() < end, f"{words!r} was not printed"
        time.sleep(0.005)


def test_without_a_terminal_every_finished_run_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with console(monkeypatch, terminal=False) as text, progress.bars() as bars:
        watch = progress.watched(bars, "building")
        for done, name in enumerate(("full", "quest")):
            watch(name, done, 2)
            watch(name, done + 1, 2)
    assert [line.partition(" [")[0] for line in text.getvalue().splitlines()] == ["full: 1 of 2", "quest: 2 of 2"]


def test_without_a_terminal_samples_are_a_line_when_all_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    with console(monkeypatch, terminal=False) as text, progress.bars() as bars:
        show = progress.shown(bars, "passkey", 2)
        for samples in (0, 1):
            for tokens in (0, 50, 100):
                show(State(samples, 2, tokens, 100, "prefill"))
        show(State(2, 2, 0, 0, "done"))
    assert [line.partition(" [")[0] for line in text.getvalue().splitlines()] == ["passkey: 2 of 2"]


def test_without_a_terminal_a_long_wait_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.05)
    begun = time.monotonic()
    with console(monkeypatch, terminal=False) as text, progress.bars() as bars:
        task = bars.add_task("prefill", total=4000)
        bars.update(task, completed=1000)
        until_said(text, "prefill: 1,000 of 4,000", 3)
    assert text.getvalue().count("prefill") <= 1 + (time.monotonic() - begun) / progress.EVERY
    with console(monkeypatch, terminal=False) as text, progress.waiting("indexing"):
        until_said(text, "indexing [")
    assert text.getvalue().startswith("indexing [")
    with console(monkeypatch, terminal=False) as text, ExitStack() as kept:
        progress.Reading(kept)(100, 100)
        until_said(text, "offloading and indexing: 100 of 100")


def test_a_terminal_gets_bars_that_go(monkeypatch: pytest.MonkeyPatch) -> None:
    with console(monkeypatch, terminal=True) as text, progress.bars() as bars:
        progress.shown(bars, "passkey", 2)(State(1, 2, 50, 100, "prefill"))
        bars.refresh()
    assert "1/2" in text.getvalue()
    assert "\n1 of 2" not in text.getvalue()


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "Hello"),
        ("eval", "passkey"),
        ("eval", "perplexity"),
        ("eval", "agreement", "--file", __file__),
        ("compare",),
        ("demo",),
        ("inspect", "--file", __file__, "--question", "What?", "-o", "page.html"),
        ("lm-eval", "--model_args", "method=full,pretrained=nobody/nothing"),
        ("reproduce", "clusterkv-f11"),
        ("serve",),
    ],
)
def test_no_command_waits_for_a_hub_that_does_not_answer(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvthaw.engine.hub.answers", lambda _: False)
    named = {"serve": ("nobody/nothing",), "lm-eval": ()}.get(command[0], ("--model", "nobody/nothing"))
    begun = time.monotonic()
    said = Said(*command, *named)
    assert (said.code, said.out) == (1, "")
    assert "'nobody/nothing'" in said.err
    assert "cannot be reached" in said.err
    assert time.monotonic() - begun < 20
