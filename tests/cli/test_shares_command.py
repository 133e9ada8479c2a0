"""kvthaw eval shares."""

from __future__ import annotations

from pathlib import Path

from said import Said


def test_shares_prints_a_table_of_lengths_and_rows(model: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    arguments = [
        "eval",
        "shares",
        "--model",
        model,
        "--length",
        "300,400",
        "--rows",
        "32,64",
        "--prompt",
        "text",
        "--page",
        "8",
    ]
    said = Said(*arguments, "--json", "--out", str(out))
    assert [(r["length"], r["rows"]) for r in said.records] == [(300, 32), (300, 64), (400, 32), (400, 64)]
    assert all(0 <= r["share"] <= 1 for r in said.records)
    assert len(out.read_text().splitlines()) == 4
    table = Said(*arguments, "--out", str(out)).out
    assert "300 tokens" in table
    assert f"automatic static share S: {model}, pages of 8, window 64, 1 prompt a cell\n" in table
    assert f"{said.records[0]['share']:.3f}" in table
