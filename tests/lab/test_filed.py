"""The benchmark of blocks in a file."""

from __future__ import annotations

import json
import sys

import pytest

from lab import filed


def test_blocks_go_to_the_file_and_come_back(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["filed", "--shape", "tiny", "--layers", "2", "--length", "8192"])
    filed.main()
    line = json.loads(capsys.readouterr().out)
    assert line["block_bytes"] == 2 * 2 * 1024 * 2 * 64 * 4
    assert all(value > 0 for name in ("write_ms", "read_ms") for value in line[name])
    assert line["all_s"] > 0
