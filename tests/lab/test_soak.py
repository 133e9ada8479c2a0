"""lab/soak.py counts what hostile clients get, and none of it is an error of the server."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "serve"))
pytest.importorskip("fastapi", reason="needs pip install 'kvthaw[serve]'")
from servers import serving

import bytemodel
from kvthaw.engine.hf.model import load
from kvthaw.errors import KvthawError
from lab import soak


def test_hostile_clients_are_refused_or_served(tmp_path: Path) -> None:
    model, tokenizer = load(str(bytemodel.save(tmp_path / "model")), dtype="float32")
    with serving(model, tokenizer, kv_dir=tmp_path / "kv") as served, ThreadPoolExecutor(1) as others:
        beside = others.submit(soak.hostile_clients, served.url, "served", 1.0, 8, "1")
        found = soak.honest_clients(served.url, 1.0, 2)
        got = beside.result()
    assert set(found.answers) == {"200"}
    assert found.percentile(50) <= found.percentile(99)
    answers = {status for each in got.answers.values() for status in each}
    assert answers <= {"left", "200", "204", "400", "403", "404", "413", "429"}
    refused = {status for kind, each in got.answers.items() if kind in soak.REFUSED for status in each}
    assert "400" in refused


def test_clients_keep_a_core() -> None:
    with pytest.raises(KvthawError, match="--cores is 4096"), soak.served("shipped", "cpu", 1 << 33, 4096, ["x"]):
        pass
