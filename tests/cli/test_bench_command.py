"""kvthaw bench."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from said import Said, refused


def test_bench_hands_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvthaw.bench import decode, figures
    from kvthaw.bench.asked import Decode, Figures

    given: list[Any] = []
    for module in (decode, figures):
        monkeypatch.setattr(module, "main", lambda asked, **_: given.append(asked) or {})
    options = ["--shape", "qwen3-4b", "--length", "100,200", "--method", "full", "--hits", "0.7", "--share-host", "--json"]
    assert Said("bench", "decode", *options).code == 0
    assert Said("bench", "figures", "--name", "length,throughput", "--shrink", "4", "--draw", "--json").code == 0
    assert given == [
        Decode(shape="qwen3-4b", length=(100, 200), method=("full",), hits=0.7, share_host=True),
        Figures(name=("length", "throughput"), shrink=4, draw=True),
    ]


def test_bench_refuses_what_it_cannot_read() -> None:
    refused(Said("bench", "decode", "--length", "4k"), 2, "length is '4k'", "whole number")
    refused(Said("bench", "decode", "--shape", "tiny7"), 1, "shape is 'tiny7'", "llama-3.1-8b")
    refused(Said("bench", "decode", "--plot", "nowhere/a.png"), 1, "folder does not exist")
    refused(Said("bench", "figures", "--name", "lenght"), 1, "name is 'lenght'", "throughput")


def test_bench_decode_prints_lines_or_a_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kvthaw.bench import shapes

    monkeypatch.setitem(shapes.SHAPES, "tiny", lambda: shapes._llama(64, 96, 2, 4, 2, 16, 128))
    out = tmp_path / "out.jsonl"
    options = ["--method", "full,quest", "--budget", "64", "--length", "256", "--new-tokens", "8", "--out", str(out)]
    said = Said("bench", "decode", *options, "--json")
    assert said.code == 0
    assert said.records == [json.loads(line) for line in out.read_text().splitlines()]
    assert [(record["setting"]["method"], record["setting"]["budget"]) for record in said.records] == [
        ("full", None),
        ("quest", 64),
    ]
    table = Said("bench", "decode", *options)  # nothing is measured again
    assert out.read_text().count("\n") == 2
    assert "quest, 64" in table.out
    assert all(part in table.out for part in ("query ms", "fetch ms", "attention ms", "model ms", "bus MB", "floor ms"))


def test_bench_indexing_shows_shares(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    said = Said("bench", "indexing", "--length", "120", "--budget", "64", "--runs", "1", "--out", str(out))
    assert said.code == 0
    assert "of prefill" in said.out
    assert [json.loads(line)["method"] for line in out.read_text().splitlines()] == ["clusterkv", "prkv"]
    refused(
        Said("bench", "indexing", "--length", "60", "--runs", "1", "--method", "oracle"),
        1,
        "method is 'oracle'",
        "pages and clusters",
    )


def test_bench_serving_shows_steps(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    some = ("bench", "serving", "--lanes", "2", "--requests", "3", "--length", "40", "--method", "full", "--out", str(out))
    said = Said(*some, "--new-tokens", "16")
    assert said.code == 0
    assert "tokens/s" in said.out
    assert [json.loads(line)["method"] for line in out.read_text().splitlines()] == ["full"]
    refused(Said(*some, "--new-tokens", "3"), 1, "none had all 2 lanes busy")


def test_bench_kernels_checks_and_times_the_tree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kvthaw.bench import kernels_tree

    small, out = kernels_tree.filled(300, 1), tmp_path / "out.jsonl"
    monkeypatch.setattr(kernels_tree, "filled", lambda length, layers: small)
    said = Said("bench", "kernels", "--method", "icecache", "--quick", "--json", "--out", str(out))
    assert said.code == 0
    assert said.records == [json.loads(line) for line in out.read_text().splitlines()]
    for record in said.records:
        assert set(record) >= {"bench", "tree_ms", "flat_ms", "recall", "attention_mass", "commit", "torch"}
    table = Said("bench", "kernels", "--method", "icecache", "--quick").out
    assert table.count("tree_ms=") == len(said.records)


def test_bench_kernels_runs_a_shared_benchmark_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvthaw.bench import kernels_decode, kernels_pages, kernels_pariskv

    ran: list[tuple[str, dict[str, Any]]] = []
    for module in (kernels_decode, kernels_pages, kernels_pariskv):
        monkeypatch.setattr(module, "main", lambda module=module, **given: ran.append((module.__name__, given)) or [])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert Said("bench", "kernels", "--method", "clusterkv,prkv,quest,arkvale,pariskv", "--json").code == 0
    given = {"quick": False, "out": None}
    assert ran == [("kvthaw.bench.kernels_pages", given), ("kvthaw.bench.kernels_pariskv", given)]


def test_bench_kernels_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refused(Said("bench", "kernels", "--method", "icecache,pariskv,decode"), 2, "pariskv, decode", "needs a CUDA device")
    refused(Said("bench", "kernels", "--method", "quests"), 2, "'quests' has no kernels")
