"""Questions about one document, asked fresh and again."""

from __future__ import annotations

import json
import sys

import pytest

from kvthaw.engine.hf.model import load
from lab import prefix


def test_a_question_about_a_document_that_is_kept_is_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--shape", "tiny", "--layers", "1", "--length", "300", "--question", "140", "--repeats", "2", "--method", "full"]
    monkeypatch.setattr(sys, "argv", ["prefix", *given, "--unsaved", "--fresh", "1"])
    prefix.main()
    line = json.loads(capsys.readouterr().out)
    assert line["cached_tokens"] == [300, 300]
    assert line["same_tokens"] is True
    assert 0 < line["reuse_s"] < line["fresh_s"] + line["document_s"]
    assert "restore_s" not in line


def test_blocks_on_the_device_are_counted_while_the_question_is_answered(model: str) -> None:
    """Once a request has ended, it holds none."""
    settings = {"budget": 64, "device_memory": 1 << 24}
    found = prefix.measure(load(model)[0], "oracle", 300, 140, 1, settings, None)
    assert found["device_block_bytes"] > 0
