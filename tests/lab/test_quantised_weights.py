"""Quantised weights side by side, on what is here."""

from __future__ import annotations

import json
import sys

import pytest

from lab import quantised


def test_steps_under_quantised_weights_are_checked_and_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--shape", "tiny", "--layers", "1", "--lengths", "50", "--new-tokens", "2", "--methods", "full"]
    monkeypatch.setattr(sys, "argv", ["quantised", *given, "--weights", "bf16,nf4"])
    quantised.main()
    checked, timed, failed = map(json.loads, capsys.readouterr().out.splitlines())
    assert checked["eager"] < 1e-3
    assert checked["eager_tokens"] == 1
    assert timed["ms"] > 0
    assert failed["weights"] == "nf4"
    assert "bitsandbytes" in failed["error"]


def test_weights_are_only_checked_or_only_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["quantised", "--shape", "tiny", "--layers", "1", "--new-tokens", "2", "--methods", "full", "--weights", "bf16"]
    monkeypatch.setattr(sys, "argv", [*given, "--lengths", "50", "--unchecked"])
    quantised.main()
    monkeypatch.setattr(sys, "argv", [*given, "--lengths", ""])
    quantised.main()
    unchecked, timed, checked = map(json.loads, capsys.readouterr().out.splitlines())
    assert "rounding" not in unchecked
    assert timed["ms"] > 0
    assert checked["eager"] < 1e-3
