"""Tables of RULER's needles: what is counted of each method's samples."""

from __future__ import annotations

from typing import Any

from kvthaw.evaluate.results import Record
from lab import needles

ABOUT = {"model": "M", "text": "essays", "gpu": "G", "commit": "c"}


def sample(method: str, length: int, seed: int, accuracy: float) -> Record:
    budget, attended = (None, None) if method == "full" else (256, 250.0)
    setting: dict[str, Any] = {
        "method": method, "budget": budget, "dense_layers": 0, "task": "t", "length": length, "seed": seed, "chat": True,
        "dtype": "bfloat16",
    }  # fmt: skip
    return Record(setting, {"accuracy": accuracy, "attended_mean": attended, "prompt": length - seed})


def test_a_line_has_the_mean_of_its_samples_and_a_row_those_of_all_lengths() -> None:
    right = {"full": (1, 1, 1, 0.5), "near": (1, 1, 1, 0), "far": (0, 0, 1, 0)}
    records = [sample(name, (1024, 2048)[i // 2], i % 2, one) for name, all in right.items() for i, one in enumerate(all)]
    made = list(needles.lines(records, ABOUT))
    assert [(one["method"], one["length"], one["n"], one["accuracy"]) for one in made if one["method"] != "full"] == [
        ("far", 1024, 2, 0),
        ("far", 2048, 2, 0.5),
        ("near", 1024, 2, 1),
        ("near", 2048, 2, 0.5),
    ]
    assert {(*one["prompts"], *one["seeds"]) for one in made} == {(1023, 1024, 0, 1), (2047, 2048, 0, 1)}
    rows = [line.split(" | ") for line in needles.table(made).splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows] == ["| `full`", "| `near`", "| `far`"]
    assert [row[1:3] for row in rows] == [["100.0", "75.0"], ["100.0", "50.0"], ["0.0", "50.0"]]
    assert [row[-1] for row in rows] == ["100.0 |", "85.7 |", "28.6 |"]
