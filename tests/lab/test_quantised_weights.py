"""Quantised weights side by side, on what is here."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest

from lab import quantised


def test_steps_under_quantised_weights_are_checked_and_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--shape", "tiny", "--layers", "1", "--lengths", "50", "--new-tokens", "2", "--methods", "full"]
    monkeypatch.setattr(sys, "argv", ["quantised", *given, "--weights", "int4-fused,nf4"])
    quantised.main()
    checked, timed, failed = map(json.loads, capsys.readouterr().out.splitlines())
    assert checked["eager"] < 1e-3
    assert checked["eager_tokens"] == 1
    assert timed["ms"] > 0
    assert failed["weights"] == "nf4"
    assert "bitsandbytes" in failed["error"]


def test_who_is_timed_waits_for_all_that_compile(tmp_path: Path) -> None:
    compiles, timed = quantised.Lock(tmp_path / "lock"), quantised.Lock(tmp_path / "lock")
    entered = threading.Event()

    def take_steps() -> None:
        with timed.alone():
            entered.set()

    waiting = threading.Thread(target=take_steps)
    waiting.start()
    assert not entered.wait(0.1)
    compiles.close()
    assert entered.wait(10)
    waiting.join()
    timed.close()


def test_weights_are_only_checked_or_only_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = ["quantised", "--shape", "tiny", "--layers", "1", "--new-tokens", "2", "--methods", "full", "--weights", "bf16"]
    monkeypatch.setattr(sys, "argv", [*given, "--lengths", "50", "--unchecked", "--lock", str(tmp_path / "lock")])
    quantised.main()
    monkeypatch.setattr(sys, "argv", [*given, "--lengths", ""])
    quantised.main()
    unchecked, timed, checked = map(json.loads, capsys.readouterr().out.splitlines())
    assert "rounding" not in unchecked
    assert timed["ms"] > 0
    assert checked["eager"] < 1e-3
