"""The benchmark of split models, of which one process has all."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lab import split


def test_what_fails_is_a_line_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "split.jsonl"
    given = ["--tp", "1", "--shape", "tiny", "--unchecked", "--steps", "eager", "--lengths", "300", "--host-memory", "1000"]
    monkeypatch.setattr(sys, "argv", ["split", *given, "--new-tokens", "2", "--out", str(out)])
    split.main()
    full, sparse = map(json.loads, out.read_text().splitlines())
    assert full["tpot_s"] > 0
    assert full["setting"]["device"].startswith("1 x")
    assert sparse["setting"]["method"] == "pariskv-plus"
    assert "1,000" in sparse["error"]
