"""Tables of RULER's needles: what is counted of each method's samples."""

from __future__ import annotations

from typing import Any

from kvthaw.evaluate.results import Record
from lab import needles

ABOUT = {"model": "M", "text": "essays", "gpu": "G", "commit": "c"}


def sample(method: str, budget: int, length: int, seed: int, accuracy: float, task: str = "ruler_niah_1") -> Record:
    attended = None if method == "full" else 250.0
    setting: dict[str, Any] = {
        "method": method, "budget": budget or None, "dense_layers": 0, "task": task, "length": length, "seed": seed, "chat": True,
        "dtype": "bfloat16",
    }  # fmt: skip
    return Record(setting, {"accuracy": accuracy, "attended_mean": attended, "prompt": length - seed})


def test_a_line_has_the_mean_of_its_samples_and_a_cell_those_of_all_lengths() -> None:
    right = {("full", 0): (1, 1, 1, 0.5), ("near", 64): (1, 1, 1, 0), ("near", 256): (1, 1, 1, 1), ("far", 64): (0, 0, 1, 0)}
    right["far", 256] = (0, 1, 1, 0)
    records = [
        sample(name, budget, (1024, 2048)[i // 2], i % 2, one)
        for (name, budget), all in right.items()
        for i, one in enumerate(all)
    ]
    made = list(needles.lines(records, ABOUT))
    assert [(one["method"], one["length"], one["n"], one["accuracy"]) for one in made if one["budget"] == 64] == [
        ("far", 1024, 2, 0),
        ("far", 2048, 2, 0.5),
        ("near", 1024, 2, 1),
        ("near", 2048, 2, 0.5),
    ]
    assert {(*one["prompts"], *one["seeds"]) for one in made} == {(1023, 1024, 0, 1), (2047, 2048, 0, 1)}
    rows = [line.split(" | ") for line in needles.table(made).splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows] == ["| `near`", "| `far`"]
    assert [[cell.split(" ")[0] for cell in row[1:]] for row in rows] == [["75.0", "100.0"], ["25.0", "50.0"]]
    assert [[cell.split(", ")[1].removesuffix(" |") for cell in row[1:]] for row in rows] == [
        ["85.7 %", "114.3 %"],
        ["28.6 %", "57.1 %"],
    ]


def test_a_task_that_is_too_hard_for_the_model_is_named_and_does_not_count() -> None:
    hard = [sample("full", 0, 1024, 0, 0.25, "ruler_cwe"), sample("near", 64, 1024, 0, 1, "ruler_cwe")]
    easy = [sample("full", 0, 1024, 0, 1), sample("near", 64, 1024, 0, 0.5)]
    text = needles.table(list(needles.lines(hard + easy, ABOUT)))
    assert "`ruler_cwe` 25 % of 1" in text
    assert "50.0 % |" in text
