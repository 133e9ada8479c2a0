"""Questions about one document, asked fresh and again."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import prefix


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
