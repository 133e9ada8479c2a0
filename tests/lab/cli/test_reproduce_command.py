"""python -m lab reproduce."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.reproduce import Experiment, Lab, Outcome, run
from said import Said, refused


def reproduce(*arguments: str, columns: int = 200) -> Said:
    return Said("reproduce", *arguments, columns=columns)


def test_the_list_says_what_each_needs() -> None:
    listed = {one["name"]: one for one in reproduce("list", "--json").records}
    assert listed["icecache-t1"]["paper_on"] == ["Llama-3.1-8B-Instruct", "Mistral-7B-Instruct-v0.2"]
    assert "gsm8k" in listed["icecache-t3"]["needs"]
    shown = reproduce("list", columns=100).out
    assert all(name in shown for name in listed)
    assert max(map(len, shown.splitlines())) <= 100


def test_the_papers_number_stands_beside_ours(model: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    asked = ("icecache-t3,pariskv-t1", "--quick", "--model", model, "--out", str(tmp_path / "out.jsonl"))
    said = reproduce(*asked, "--plot", str(tmp_path / "pictures"), "--json")
    rows = {(one["name"], one["row"]): one for one in said.records}
    one = rows["icecache-t3", "icecache:budget=0.1"]
    assert one["paper"] == {"accuracy": 47.4}
    assert 0 <= one["ours"]["accuracy"] <= 100
    assert one["ours_on"].startswith("NOT comparable")
    assert rows["pariskv-t1", "MATH500"]["ours"]["update"] == rows["pariskv-t1", "MATH500"]["paper"]["update"] == 256
    for name in ("icecache-t3", "pariskv-t1"):
        assert (tmp_path / "pictures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    again = reproduce(*asked, columns=80)
    assert "47.4" in again.out
    assert "NOT comparable" in again.out
    assert max(len(line) for line in again.out.splitlines() if "; " not in line) <= 80  # all but titles


def test_what_is_missing_is_said_in_one_line(model: str) -> None:
    refused(reproduce("icecache-t3"), 1, "--model")
    refused(reproduce("icecache-t3", "--model", model), 1, "gsm8k", "data")
    refused(reproduce("icecache-t33"), 1, "icecache-t3")
    refused(reproduce("icecache-f7"), 1, "GPU", "--quick")


def test_what_was_measured_is_printed_though_another_name_could_not_be(model: str) -> None:
    said = reproduce("icecache-f7,icecache-f6,pariskv-t1,clusterkv-f12", "--model", model, "--limit", "1", "--json")
    assert {one["name"] for one in said.records} == {"pariskv-t1"}
    assert said.code == 1
    *notes, error = said.err.splitlines()
    assert all(line.startswith("icecache-f6: ") and "positions end at" in line for line in notes)
    assert all(words in error for words in ("icecache-f7, clusterkv-f12: ", "GPU", "icecache-f6: ", "positions end at"))


def test_what_was_measured_is_printed_where_a_run_is_stopped(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(one: Experiment, lab: Lab) -> Outcome:
        if one.name == "icecache-t3":
            raise KeyboardInterrupt
        return run(one, lab)

    monkeypatch.setattr("lab.reproduce.run", stopped)
    said = reproduce("pariskv-t1,icecache-t3", "--quick", "--model", model, "--json")
    assert {one["name"] for one in said.records} == {"pariskv-t1"}
    assert said.code == 130
