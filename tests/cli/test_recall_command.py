"""kvthaw eval recall, kvthaw eval drift."""

from __future__ import annotations

from pathlib import Path

import pytest
from said import Said

PARIS = "pariskv:window=16:buffer=16"


def test_recall_prints_one_object_a_run(model: str, tmp_path: Path) -> None:
    out, plot = tmp_path / "out.jsonl", tmp_path / "plot.png"
    arguments = ["eval", "recall", "--model", model, "--method", f"{PARIS},quest", "--budget", "64", "--retrieved", "10"]
    arguments += ["--length", "700", "--steps", "4", "--out", str(out)]
    said = Said(*arguments, "--json", "--plot", str(plot))
    assert said.code == 0
    assert [(r["method"], r["budget"], r["retrieved"]) for r in said.records] == [
        (PARIS, 64, None),
        (PARIS, None, 10),
        ("quest", 64, None),
        ("quest", None, 10),
    ]
    named = {"recall_at_k", "attention_mass", "mass_of_exact", "retrieved_of_exact", "output_error", "ceiling", "rows"}
    for record in said.records:
        assert set(record) >= named | {"layers", "bins", "kinds", "samples", "seed", "versions", "model", "length"}
        assert set(record["kinds"]) == {"text", "needle"}
        assert [layer["layer"] for layer in record["layers"]] == [0, 1]
        assert ("recall_at_10" in record) == (record["retrieved"] == 10)
        assert record["eval"] == "recall"
        assert (record["ceiling"] is None) == (record["method"] == "quest")
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert len(out.read_text().splitlines()) == 4 * 2
    table = Said(*arguments)
    assert len(out.read_text().splitlines()) == 4 * 2
    assert "ceiling" in table.out
    assert table.out.count("10 rows") == 2 * 2


def test_recall_by_layer_of_a_text(model: str, tmp_path: Path) -> None:
    text, plot = tmp_path / "text.txt", tmp_path / "plot.png"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 5)
    arguments = (
        "--model",
        model,
        "--method",
        "quest,streaming",
        "--prompt",
        "text",
        "--text",
        str(text),
        "--length",
        "300,400",
    )
    said = Said("eval", "recall", *arguments, "--steps", "2", "--json", "--plot", str(plot))
    assert [(r["method"], r["length"], r["budget"]) for r in said.records] == [
        ("quest", 300, 256),
        ("streaming", 300, 256),
        ("quest", 400, 256),
        ("streaming", 400, 256),
    ]
    assert said.records[1]["recall_at_k"] is None
    assert len({record["text"] for record in said.records} | {"book"}) == 2
    assert plot.exists()


def test_drift_shows_first_and_last_quarter(model: str, tmp_path: Path) -> None:
    out, plot = tmp_path / "out.jsonl", tmp_path / "plot.png"
    arguments = ["eval", "drift", "--model", model, "--length", "300", "--new-tokens", "40", "--probe", "5", "--retrieved", "8"]
    arguments += ["--method", f"{PARIS},{PARIS}:centroids=learned", "--out", str(out)]
    said = Said(*arguments, "--json", "--plot", str(plot))
    assert said.code == 0
    assert len(said.records) == len(out.read_text().splitlines()) == 2
    for record in said.records:
        assert (len(record["quarters"]), len(record["bins"])) == (4, 8)
        assert all(0 < part["recall_at_8"] <= 1 for part in record["quarters"])
        assert record["eval"] == "drift"
        assert record["follow"] == "text"
    assert plot.read_bytes().startswith(b"\x89PNG")
    table = Said(*arguments).out
    assert "quarter" in table
    assert "last" in table
    assert "ceiling" in table
    assert "40 tokens (the text's own) after 300" in table


@pytest.mark.parametrize(("follow", "words"), [("own", "each method's own"), ("full", "full attention's, for all")])
def test_drift_says_whose_tokens_were_sent(model: str, tmp_path: Path, follow: str, words: str) -> None:
    arguments = ["eval", "drift", "--model", model, "--length", "99", "--new-tokens", "8", "--probe", "2", "--method", "quest"]
    arguments += ["--follow", follow, "--out", str(tmp_path / "out.jsonl")]
    sent = Said(*arguments, "--json").records[0]
    assert (sent["follow"], sent["temperature"], sent["retrieved"]) == (follow, 1.0, 100)
    assert f"8 tokens ({words}, temperature 1.0) after 99" in Said(*arguments).out
