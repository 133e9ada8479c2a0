"""Rivals side by side, on what is here."""

from __future__ import annotations

import json
import sys

import pytest

from lab import rivals


def test_rivals_are_timed_on_the_same_keys(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--shape", "tiny", "--layers", "3", "--lengths", "300", "--steps", "4", "--rivals", "full,static,pariskv-plus"]
    monkeypatch.setattr(sys, "argv", ["rivals", *given])
    rivals.main()
    full, static, sparse = map(json.loads, capsys.readouterr().out.splitlines())
    assert [line["rival"] for line in (full, static, sparse)] == ["full", "static", "pariskv-plus"]
    assert all(line["ms"] > 0 for line in (full, static, sparse))
    assert full["off"] == 0
    assert static["off"] < 1e-4


@pytest.mark.gpu
def test_full_attention_over_keys_of_eight_bits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--shape", "tiny", "--layers", "3", "--lengths", "300", "--steps", "4", "--rivals", "full,full-fp8"]
    monkeypatch.setattr(sys, "argv", ["rivals", *given])
    rivals.main()
    _, eight = map(json.loads, capsys.readouterr().out.splitlines())
    assert eight["off"] < 0.1
    assert eight["ms"] > 0
