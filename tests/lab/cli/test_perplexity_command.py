"""python -m lab eval perplexity."""

from __future__ import annotations

from pathlib import Path

import pytest

from said import Said


def test_eval_perplexity(model: str, tmp_path: Path) -> None:
    plot, out = tmp_path / "ppl.png", tmp_path / "ppl.jsonl"
    arguments = ["eval", "perplexity", "--model", model, "--method", "streaming", "--budget", "64", "--length", "100,200"]
    arguments += ["--measured", "4", "--out", str(out)]
    said = Said(*arguments, "--json", "--plot", str(plot))
    assert [(record["method"], record["length"]) for record in said.records] == [
        ("streaming", 100),
        ("streaming", 200),
        ("full", 100),
        ("full", 200),
    ]
    assert plot.read_bytes().startswith(b"\x89PNG")
    table = Said(*arguments)
    assert len(out.read_text().splitlines()) == 4
    assert all(word in table.out for word in ("perplexity", "streaming", "full", "200", "nats"))
    alone = Said(*arguments[:-2], "--no-full", "--json")
    assert [(r["length"], r["nll"], r["difference"]) for r in alone.records] == [
        (r["length"], pytest.approx(r["nll"], abs=1e-5), None) for r in said.records[:2]
    ]


def test_the_table_fits_a_terminal(model: str) -> None:
    some = ("eval", "perplexity", "--model", model, "--method", "icecache-digest-device,quest", "--budget", "64")
    said = Said(*some, "--length", "256,300", "--measured", "4", columns=80)
    assert said.code == 0, said.err
    lines = said.out.splitlines()
    assert "budget 64" in lines[0]
    assert max(map(len, lines[1:])) <= 80
    assert sum(line.split()[:2] == ["300", "icecache-digest-device"] for line in lines) == 1, "one table"
