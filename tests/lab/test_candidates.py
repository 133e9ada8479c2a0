"""How many candidates the codes must rank: what the counts mean, on a model whose keys are known to be ranked well."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from kvthaw.evaluate.files import read_asset
from lab import candidates


def test_ranking_all_keys_finds_what_the_codes_can_find() -> None:
    torch.manual_seed(0)
    keys, queries = torch.randn(2, 700, 32), torch.randn(3, 4, 32)
    found = list(candidates.measure(keys, queries, 32**-0.5, rows=10))
    assert len(found) == 2 * 3
    for ranks, mass, by in found:
        assert ranks == sorted(set(ranks))
        assert 0 < mass < 1
        assert list(by) == [256, 512, 1024]
        assert by[1024][0] > 0.7, "4-bit codes rank random keys well"
        assert by[256][0] <= by[1024][0] + 0.2
        assert by[1024][1] == pytest.approx(mass, rel=0.3), "the rows found are nearly the exact ones"


def test_lengths_beyond_the_models_are_pooled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out.jsonl"
    text.write_text(read_asset("book.txt")[:24_000])
    argv = ["--model", "shipped", "--text", text, "--layers", "1,2", "--own", "768,1024", "--pooled", "2048", "--rows", "16"]
    monkeypatch.setattr(sys, "argv", ["candidates", *map(str, argv), "--device", "cpu", "--out", str(out)])
    candidates.main()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(one["tokens"], one["pieces"]) for one in lines] == [(768, 1), (1024, 1), (2048, 4)]
    assert all(one["needed"]["0.5"] <= one["needed"]["0.9"] <= one["tokens"] for one in lines)
