"""Tables on a terminal."""

from __future__ import annotations

import pytest

from kvthaw.cli.common import print_wide
from kvthaw.evaluate.report import lay_out

LENGTHS = [str(2**at) for at in range(8, 25)]


def shown(
    rows: list[list[str]], columns: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    monkeypatch.setenv("COLUMNS", "80")
    title = "A title of model[draft] that is longer than the terminal, which is then one line all the same, as it is"
    print_wide(lay_out(title, columns, rows))
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == title
    return [line.rstrip() for line in lines]


def test_a_wide_table_goes_on_below_with_what_tells_its_rows_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [[name, budget, *LENGTHS] for name in ("full", "pariskv-plus") for budget in ("64", "256")]
    lines = shown(rows, ["method", "budget", *LENGTHS], monkeypatch, capsys)
    assert max(map(len, lines)) <= 80
    heads = [line.split() for line in lines if "method" in line]
    assert len(heads) > 1
    assert all(head[:2] == ["method", "budget"] for head in heads)
    assert [name for head in heads for name in head[2:]] == LENGTHS
    last = [line.split() for line in lines if line.split()[:2] == ["pariskv-plus", "256"]]
    assert [cell for line in last for cell in line[2:]] == LENGTHS


def test_a_blank_cell_stands_for_the_one_above(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [[name, whose, *LENGTHS] for method in ("full", "quest") for name, whose in ((method, "paper"), ("", "ours"))]
    lines = shown(rows, ["", " ", *LENGTHS], monkeypatch, capsys)
    assert max(map(len, lines)) <= 80
    assert len([line for line in lines if line.split()[:2] == ["quest", "paper"]]) > 1


def test_a_table_that_fits_is_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert len([line for line in shown([["full", "1"]], ["method", "ms"], monkeypatch, capsys) if "method" in line]) == 1
    long = shown([["x" * 90, "1"]], ["method", "ms"], monkeypatch, capsys)
    assert any("x" * 90 in line for line in long), "a cell is not cut short"
