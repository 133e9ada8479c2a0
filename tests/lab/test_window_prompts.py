"""The benchmark of prompts through layers of windows, on what is here."""

from __future__ import annotations

import json
import sys

import pytest

from lab import windows


def test_every_way_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(windows.SIZES, "tiny", (32, 32, 2, 1, 16, 24))
    given = ["--shape", "tiny", "--layers", "6", "--lengths", "100", "--chunk", "64", "--runs", "1"]
    monkeypatch.setattr(sys, "argv", ["windows", *given])
    windows.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["setting"]["way"] for line in lines] == ["kvthaw", "whole", "transformers"]
    assert all(line["seconds"] > 0 and line["peak_bytes"] >= 0 for line in lines)
