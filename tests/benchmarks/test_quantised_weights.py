"""Quantised weights side by side, on what is here."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import quantised


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
