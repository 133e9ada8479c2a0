"""A document restored by another process."""

from __future__ import annotations

import json
import sys

import pytest

from lab import restored


def test_a_document_is_restored_by_another_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--shape", "tiny", "--layers", "2", "--length", "1500", "--question", "20", "--method", "pariskv-plus"]
    monkeypatch.setattr(sys, "argv", ["restored", *given])
    restored.main()
    line = json.loads(capsys.readouterr().out)
    assert line["setting"]["method"] == "pariskv-plus"
    assert line["kv_bytes"] > 2 * 1500 * 1024  # two layers, two KV heads of 64 numbers in float32
    assert all(line[name] > 0 for name in ("save_s", "restore_s", "again_s", "question_s", "asked_again_s", "hash_s"))
