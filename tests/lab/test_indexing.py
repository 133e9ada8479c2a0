"""What indexing costs: the fields of a line, and the check beside it."""

from __future__ import annotations

import json

import pytest
import torch

from kvthaw.engine.hf import Cache
from kvthaw.errors import CacheError
from lab import indexing
from lab.bench.shapes import build


def test_the_command_writes_a_line_a_method(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--shape=tiny", "--length=200", "--budget=64", "--method=clusterkv:tokens_per_cluster=20,quest"]
    monkeypatch.setattr("sys.argv", ["indexing", *asked])
    indexing.main()
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["method"], line["bench"]) for line in found] == [
        ("clusterkv:tokens_per_cluster=20", "indexing"),
        ("quest", "indexing"),
    ]


def test_shares_are_of_the_times_measured() -> None:
    (line,) = indexing.lines("tiny", 200, ("prkv:page=8:window=16",), budget=64, runs=1)
    assert line["indexing_share"] == pytest.approx(line["indexing_s"] / line["prefill_full_s"])
    assert line["beside_share"] == pytest.approx(line["prefill_s"] / line["prefill_full_s"] - 1)
    assert line["refresh_share"] == pytest.approx(line["refresh_s"] / line["step_s"] / 128)
    assert (line["interval"], line["length"], line["budget"]) == (128, 200, 64)


@torch.no_grad()
def test_an_index_that_is_another_alone_is_seen() -> None:
    model = build("tiny", torch.device("cpu"))
    cache = Cache(model, "clusterkv", budget=64)
    model(torch.arange(150)[None], past_key_values=cache)
    index = cache.kv.offloaded[1].retriever.index  # type: ignore[union-attr]
    assert isinstance(index, indexing.UnitIndex)
    assert indexing.again(cache, 1, index) > 0
    index.digests[0, 0, 0, 0] += 1
    with pytest.raises(CacheError, match="layer 1: digests, made beside the prefill"):
        indexing.again(cache, 1, index)
