"""The benchmark of a small card, on what is here."""

from __future__ import annotations

import json
import sys

import pytest

from lab import small_card


def test_every_contender_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--shape", "tiny", "--lengths", "256", "--steps", "6", "--budget", "128", "--contenders", "kvthaw,dynamic"]
    monkeypatch.setattr(sys, "argv", ["small_card", *given])
    small_card.main()
    *lines, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["card"], line["contender"]) for line in lines] == [
        (card, contender) for card in ("small", "whole") for contender in ("kvthaw", "dynamic")
    ]
    assert all(line["ms"] > 0 and len(line["tokens"]) == 7 for line in lines)
    assert last["longest"] == {"kvthaw": 256, "dynamic": 256}
    assert last["same_tokens"]


def test_a_cache_may_be_filled(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--shape", "tiny", "--layers", "1", "--lengths", "256", "--steps", "6", "--budget", "128", "--method", "quest"]
    given += ["--contenders", "kvthaw,dynamic", "--dense-layers", "0", "--cards", "small"]
    for filled in ("kvthaw,dynamic", "dynamic"):
        monkeypatch.setattr(sys, "argv", ["small_card", *given, "--filled", filled])
        small_card.main()
        ours, theirs, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert (ours["method"], ours["filled"], theirs["filled"]) == ("quest", "kvthaw" in filled, True)
        assert ("fill_s" in ours) == ours["filled"]
        assert ours["kv_host_bytes"]
        assert theirs["fill_s"] > 0
        assert len(ours["tokens"]) == len(theirs["tokens"]) == 7
        assert last["same_tokens"]
