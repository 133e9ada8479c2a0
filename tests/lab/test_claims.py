"""Claims judged over the cells of a comparison, and cells in files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvthaw.errors import ConfigError
from kvthaw.evaluate.results import Record
from lab.cells import Cell, cells_of, read_cells, read_stretches, records_of, write_cells, write_stretches
from lab.claims import (
    BASELINES,
    CLAIMS,
    OURS,
    Asked,
    Claim,
    Paired,
    by_budget,
    by_task,
    complete,
    judge,
    main,
    verdicts,
)
from lab.compared import newest, pooled, summary
from lab.evaluate.compare import summaries

ABOUT = ("toy", "w", "float32", "cpu", "0", "")
MEANS = {
    "attended_mean": 50.0,
    "retrieved": 30.0,
    "hit_rate": 0.5,
    "attention_mass": None,
    "recall_at_k": 0.7,
    "output_error": None,
}


def cell(method: str, budget: int | None, scores: list[float], **other: Any) -> Cell:
    places = {(seed, (0.0, 0.5)[seed % 2]): score for seed, score in enumerate(scores)}
    about = {"about": ABOUT, "task": "passkey", "length": 4096, "question": "dense", "retrieved": None, "dense_layers": 0}
    sizes = {"kv_device_bytes": (budget or 4096) * 1024, "kv_host_bytes": 0, "means": MEANS}
    return Cell(**{**about, **sizes, "method": method, "budget": budget, "scores": places, **other})


def toy() -> list[Cell]:
    """Two tasks, one of which full attention cannot do, every method at 64 and 256."""
    every = ("oracle", *OURS, *BASELINES)
    cells = [cell("full", None, [1.0] * 10), cell("full", None, [0.0] * 10, task="hard")]
    for name in every:
        right = 5 if name == "prkv-plus" else 10
        cells += [cell(name, budget, [1.0] * right + [0.0] * (10 - right)) for budget in (64, 256)]
        cells.append(cell(name, 256, [0.0] * 10, task="hard"))
    return cells


def test_paired_difference_against_its_formula() -> None:
    mine, theirs = cell("a", 64, [1, 1, 1, 0, 1, 0, 1, 1]), cell("b", 64, [1, 0, 1, 0, 0, 1, 1, 1])
    paired = Paired.of([mine], [theirs])
    assert paired is not None
    b, c, n = 2, 1, 8  # Agresti and Min: half a pair more in each of the four fields
    middle = (b - c) / (n + 2)
    spread = 1.959964 * ((b + c + 1) / (n + 2) - middle**2) ** 0.5 / (n + 2) ** 0.5
    assert (paired.n, paired.difference) == (8, 1 / 8)
    assert (paired.low, paired.high) == pytest.approx((middle - spread, middle + spread))
    assert (paired.mine, paired.theirs) == (6 / 8, 5 / 8)


def test_only_samples_of_both_are_paired() -> None:
    few = cell("b", 64, [0.0, 0.0, 0.0])
    paired = Paired.of([cell("a", 64, [1.0] * 10), cell("a", 64, [1.0], task="other")], [few])
    assert paired is not None
    assert (paired.n, paired.difference) == (3, 1.0)
    assert Paired.of([cell("a", 64, [1.0], task="other")], [few]) is None


@pytest.mark.parametrize(
    ("right", "share", "margin", "verdict"),
    [
        (100, 0.9, 0.0, "met"),
        (100, 1.0, 0.05, "met"),  # the interval of 100 equal pairs is some two points wide
        (100, 1.0, 0.0, "undecided"),  # nothing shows that it is no worse at all
        (97, 1.0, 0.0, "undecided"),
        (50, 0.9, 0.0, "not met"),
    ],
)
def test_a_claim_is_met_only_where_the_interval_allows_it(right: int, share: float, margin: float, verdict: str) -> None:
    cells = [cell("full", None, [1.0] * 100), cell("quest", 64, [1.0] * right + [0.0] * (100 - right))]
    (found,) = judge(cells, Claim("somebody", Asked("quest", 64), share=share, margin=margin))
    assert found.verdict == verdict


def test_few_samples_meet_no_claim() -> None:
    cells = [cell("full", None, [1.0] * 5), cell("quest", 64, [1.0] * 5)]
    assert judge(cells, Claim("somebody", Asked("quest", 64), share=0.99))[0].verdict == "undecided"


def test_every_claim_has_a_row_and_what_was_not_run_says_so() -> None:
    table = verdicts(toy())
    rows = {str(claim): [getattr(value, "text", value) for value in row] for claim, row in zip(CLAIMS, table.rows, strict=True)}
    assert len(rows) == len(CLAIMS)  # no two of one name
    assert rows["icecache at 256 keeps 99 % of full"][2] == "not measured"
    assert rows["prkv-plus at 256 keeps 99 % of full"][2:4] == ["not met", "full"]
    assert rows["prkv-plus at 256 equals every baseline at 256"][2] == f"not met {len(BASELINES)} of {len(BASELINES)}"
    fewer = [one for one in toy() if one.method != "quest"]
    assert "1 not measured" in str(verdicts(fewer).rows[list(rows).index("prkv-plus at 256 equals every baseline at 256")][2])
    assert {"full", "oracle", "auto", "icecache", *OURS}.isdisjoint(BASELINES)


def test_only_seeds_that_every_method_has_done_are_complete() -> None:
    cells = [
        cell(name, budget, [1.0] * n, task=task)
        for name, budget, n, task in (
            ("full", None, 9, "a"),
            ("quest", 64, 5, "a"),
            ("full", None, 9, "b"),
            ("quest", 64, 9, "b"),
            ("oracle", 64, 9, "b"),
            ("oracle", 64, 7, "a"),
            ("full", None, 9, "c"),
        )
    ]
    assert {(one.method, one.task): one.n for one in complete(cells)} == {
        (name, task): 5 for task in ("a", "b") for name in ("full", "quest", "oracle")
    }


def test_a_claim_may_be_of_some_tasks_and_of_rows() -> None:
    cells = [cell("full", None, [1.0] * 9), cell("full", None, [1.0] * 9, task="other")]
    cells += [cell("quest", None, [0.0] * 9, retrieved=100), cell("quest", None, [1.0] * 9, retrieved=100, task="other")]
    (found,) = judge(cells, Claim("somebody", Asked("quest", retrieved=100), tasks=("other",)))
    assert (found.paired.n, found.paired.difference) == (9, 0.0)


def test_the_mean_by_budget_is_of_what_full_attention_can_do() -> None:
    table = by_budget(toy())
    assert table.columns == ("method", "64 tokens", "256 tokens")
    rows = {row[0]: row[1:] for row in table.rows}
    assert [getattr(value, "text", value) for value in rows["prkv-plus"]] == ["50", "50"]
    assert [getattr(value, "n", None) for value in rows["full"]] == [10, 10]  # nothing of the hard task
    assert table.rows[0][0] == "full"
    assert table.rows[-1][0] == "prkv-plus"
    later = [replace(one, scores={**one.scores, (10, 0.0): 0.0}) if one.method == "quest" else one for one in toy()]
    assert by_budget(later).rows == table.rows  # a sample that only one method has counts for none
    longer = [cell(name, budget, [0.0] * 10, length=8192) for name, budget in (("full", None), ("quest", 256))]
    assert by_budget([*toy(), *longer]).rows == table.rows  # nor does work that was run at one budget only


def test_accuracy_by_task_has_a_row_for_every_number_of_rows() -> None:
    longer = [cell(name, budget, [1.0] * 10, length=8192) for name, budget in (("full", None), ("quest", 256))]
    others = cell("quest", None, [1.0] * 4 + [0.0] * 6, retrieved=100), replace(cell("quest", 64, [1.0] * 10), budget=0.5)
    table = by_task([*toy(), *longer, *others], 256)
    assert by_budget([*toy(), *others]).rows == by_budget(toy()).rows
    assert table.columns == ("method", "hard", "passkey", "attended")
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["full"][1] == "100 / 100"
    assert rows["quest"] == ["0 / -", "100 / 100", "50"]
    assert rows["quest, 100 retrieved"] == ["- / -", "40 / -", "50"]
    assert rows["quest at 0.5"] == ["- / -", "100 / -", "50"]
    assert rows["prkv-plus"][1] == "50 / -"
    assert table.rows[0][0] == "full"


def test_cells_survive_their_file_and_become_records(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    write_cells(toy(), path)
    assert read_cells(path) == toy()
    records = records_of(toy())
    assert [(one.method, one.n, one.accuracy) for one in cells_of(records)] == [
        (one.method, one.n, one.accuracy) for one in toy()
    ]
    found = summaries(records)
    assert found.perplexities == []
    assert len(found.tasks) == len(toy())
    path.write_bytes(path.read_bytes() + b"\xff\n")
    with pytest.raises(ConfigError, match=rf"line {len(toy()) + 1} of .*cells\.jsonl"):
        read_cells(path)


def test_lines_of_perplexity_survive_their_file(tmp_path: Path) -> None:
    about = {"method": "quest", "budget": 64, "length": 100}
    measures: dict[str, Any] = {"nll": [1.0, 2.0], "attended_mean": 3.0, "attended_max": 4, "seconds": 0.5, "held_budget": 64}
    records = [Record({**about, "seed": seed, "start": 7 * seed}, measures) for seed in range(3)]
    write_cells(toy(), tmp_path / "cells.jsonl")
    write_stretches(records, tmp_path / "cells.jsonl")
    assert [json.loads(one.to_json()) for one in read_stretches(tmp_path / "cells.jsonl")] == [
        json.loads(one.to_json()) for one in records
    ]
    write_cells(toy(), tmp_path / "others.jsonl")
    assert read_stretches(tmp_path / "others.jsonl") == []


def test_rows_of_another_machine_are_added_and_named(tmp_path: Path) -> None:
    older = tmp_path / "older.jsonl"
    write_cells([one for one in toy() if one.task == "passkey"], older)
    about = (*ABOUT[:3], "H100", "1", ABOUT[5])
    newer = [cell("full", None, [1.0] * 10, about=about), cell("quest", None, [1.0] * 9 + [0.0], retrieved=100, about=about)]
    write_cells(newer, tmp_path / "newer.jsonl")
    cells = newest([older, tmp_path / "newer.jsonl"])
    assert [one.about[3] for one in cells if one.full] == ["H100"]
    assert summary(cells).startswith("cpu (full, quest, 100 retrieved: H100), bfloat16; ")
    (found,) = judge(cells, Claim("somebody", Asked("quest", retrieved=100)))
    assert found.paired.n == 10


def test_claims_count_further_seeds_of_the_same_cells() -> None:
    """Of other machines too; samples that both have count once, and what was not published stays out."""
    cells = [cell("full", None, [1.0] * 10), cell("icecache", 64, [1.0] * 10)]
    about, places = (*ABOUT[:3], "H100", *ABOUT[4:]), [(seed, 0.0) for seed in range(20)]
    more = [replace(one, about=about, scores=dict.fromkeys(places, one.full * 1.0)) for one in cells]
    more.append(cell("quest", 64, [1.0]))
    (found,) = judge(pooled(cells, more), Claim("somebody", Asked("icecache", 64)))
    assert (found.paired.n, found.verdict) == (25, "not met")
    assert found.paired.mine == 10 / 25
    assert ", some over further seeds" in summary(cells, more)


def test_claims_of_any_results_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_cells([cell("full", None, [1.0] * 10), cell("icecache", 256, [1.0] * 10)], tmp_path / "pairs.jsonl")
    main([str(tmp_path / "pairs.jsonl")])
    printed = capsys.readouterr().out
    assert "pairs.jsonl, cpu" in printed
    assert "icecache at 256 keeps 99 % of full | IceCache, abstract | undecided" in printed
    assert "not measured" not in printed
    assert "| icecache at 256 | 100 | 50 |" in printed or "| icecache | 100 | 50 |" in printed
