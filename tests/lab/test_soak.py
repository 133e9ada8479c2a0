"""lab/soak.py counts what hostile clients get, and none of it is an error of the server."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "serve"))
pytest.importorskip("fastapi", reason="needs pip install 'kvthaw[serve]'")
from servers import serving

import bytemodel
from kvthaw.engine.hf.model import load
from lab import soak


def test_hostile_clients_are_refused_or_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = load(str(bytemodel.save(tmp_path / "model")), dtype="float32")
    hostile = soak.Hostile(soak.REFUSED | soak.SERVED, seed=1)
    with serving(model, tokenizer, kv_dir=tmp_path / "kv") as served:
        found = asyncio.run(soak.clients(served.url, 1.0, 2, 8, hostile))
    assert set(found.answers) == {"200"}
    assert found.percentile(50) <= found.percentile(99)
    answers = {status for each in hostile.answers.values() for status in each}
    assert answers <= {"left", "200", "204", "400", "403", "404", "413", "429"}
    refused = {status for kind in soak.REFUSED for status in hostile.answers[kind]}
    assert "400" in refused
