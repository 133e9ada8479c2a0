"""A comparison: what is run, by how many processes, what follows from the cells, and the report."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import bytemodel
from kvthaw.cli import app
from kvthaw.errors import ConfigError, KvthawError
from kvthaw.evaluate import variant, workers
from kvthaw.evaluate.cells import Cell, Folder, cells_of, read_cells, write_cells
from kvthaw.evaluate.compare import BASELINES, SUBJECTS, Grid, Paired, goals, hopes, protocols, under, units
from kvthaw.evaluate.document import Document
from kvthaw.evaluate.job import Job, Unit
from kvthaw.evaluate.model import load
from kvthaw.evaluate.overview import by_budget, overview
from kvthaw.evaluate.perplexity import Course, Stretch
from kvthaw.evaluate.results import Line
from kvthaw.evaluate.runner import Runner
from kvthaw.evaluate.variant import FULL, Variant
from kvthaw.evaluate.workers import Bench, Failure, Source, work
from kvthaw.methods.options import digest

ABOUT = ("toy", "w", "float32", "cpu", "0", "")
MEANS = {
    "attended_mean": 50.0,
    "retrieved": 30.0,
    "hit_rate": 0.5,
    "attention_mass": None,
    "recall_at_k": 0.7,
    "output_error": None,
}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def cell(method: str, budget: int | None, scores: list[float], **other: Any) -> Cell:
    places = {(seed, (0.0, 0.5)[seed % 2]): score for seed, score in enumerate(scores)}
    about = {"about": ABOUT, "task": "passkey", "length": 4096, "question": "dense", "retrieved": None, "dense_layers": 0}
    sizes = {"kv_device_bytes": (budget or 4096) * 1024, "kv_host_bytes": 0, "means": MEANS}
    return Cell(**{**about, **sizes, "method": method, "budget": budget, "scores": places, **other})


def toy() -> list[Cell]:
    """Two tasks, one of which full attention cannot do, every method at 64 and 256."""
    every = ("oracle", *SUBJECTS, *BASELINES)
    cells = [cell("full", None, [1.0] * 10), cell("full", None, [0.0] * 10, task="hard")]
    for name in every:
        right = 9 if name == "prkv" else 10
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


def test_goals_follow_from_the_cells_and_none_is_left_out() -> None:
    found = {goal.text: goal for goal in goals(toy())}
    assert len(found) == 4 + 5 * len(BASELINES)
    assert "oracle" not in " ".join(BASELINES)
    assert found["icecache at 256 keeps 99 % of full"].met
    assert found["prkv at 256 keeps 99 % of full"].met is False
    assert all(found[f"prkv at 256 equals {name} at 256"].met is False for name in BASELINES)
    assert all(found[f"icecache at 64 equals {name} at 256"].met for name in BASELINES)
    assert all(goal.paired is not None and goal.paired.n == 10 for goal in found.values())  # nothing of the hard task
    fewer = [one for one in toy() if one.method != "quest"]
    assert [goal.text for goal in goals(fewer) if goal.met is None] == [text for text in found if "quest" in text]


def test_goals_that_belong_together_have_one_verdict() -> None:
    every = 5 * len(BASELINES)
    found = {hope.text: hope for hope in hopes(goals(toy()))}
    assert len(found) == 4 + 5
    assert sum(hope.of for hope in found.values()) == 4 + every
    assert found["icecache at 64 equals every baseline at 256"].verdict == f"met ({len(BASELINES)} of {len(BASELINES)})"
    missed = found["prkv at 256 equals every baseline at 256"]
    assert missed.verdict == f"not met (0 of {len(BASELINES)}, {len(BASELINES)} more within the interval)"
    assert missed.tightest is not None
    assert missed.tightest.paired is not None
    assert missed.tightest.paired.difference == pytest.approx(-0.1)
    assert found["prkv at 256 keeps 99 % of full"].verdict == "not met"
    fewer = {hope.text: hope for hope in hopes(goals([one for one in toy() if one.method not in ("quest", "prkv")]))}
    assert fewer["icecache at 64 equals every baseline at 256"].verdict.endswith(", 1 not measured")
    assert fewer["prkv at 256 keeps 99 % of full"].verdict == "not measured"


def test_the_mean_by_budget_is_of_what_full_attention_can_do() -> None:
    table = by_budget(toy())
    assert table.columns == ("method", "64 tokens", "256 tokens")
    rows = {row[0]: row[1:] for row in table.rows}
    assert [getattr(value, "text", value) for value in rows["prkv"]] == ["90", "90"]
    assert [getattr(value, "n", None) for value in rows["full"]] == [10, 10]  # nothing of the hard task
    assert table.rows[0][0] == "full"
    assert table.rows[-1][0] == "prkv"
    later = [replace(one, scores={**one.scores, (10, 0.0): 0.0}) if one.method == "quest" else one for one in toy()]
    assert by_budget(later).rows == table.rows  # a sample that only one method has counts for none
    longer = [cell(name, budget, [0.0] * 10, length=8192) for name, budget in (("full", None), ("quest", 256))]
    assert by_budget([*toy(), *longer]).rows == table.rows  # nor does work that was run at one budget only


def test_protocols_are_apart_and_full_attention_is_of_all() -> None:
    cells = [*toy(), cell("quest", 256, [1.0] * 3, dense_layers=2), cell("quest", 256, [1.0] * 3, question="sparse")]
    assert protocols(cells) == [("dense", 0), ("dense", 2), ("sparse", 0)]
    assert {c.method for c in under(cells, ("dense", 2))} == {"full", "quest"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bytemodel.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> tuple[Any, Any]:
    return load(str(folder))


GRID = Grid(("passkey",), ("full", "oracle", "streaming"), (64,), (320, 400), samples=3, depths=(0.0, 0.5))


def compute(runner: Runner, of: list[Unit]) -> list[Line]:
    lines = [line for unit in of for some in runner.compute(unit) for line in some]
    runner.results.extend(lines)
    return lines


def plain(lines: list[Line]) -> list[str]:
    return sorted(json.dumps([line.setting.key(), line.output, line.accuracy, line.sparse_steps]) for line in lines)


def test_a_cell_is_a_file_and_what_is_there_is_not_run_again(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    todo = units(Runner(*loaded, Folder(tmp_path / "out"), batch=2), GRID)
    assert [(unit.job.length, len(unit.places)) for unit in todo] == [(320, 1), (400, 1), (320, 2), (400, 2)]
    assert {unit.variants[0] for unit in todo} == {FULL}
    assert len({unit.variants[1] for unit in todo}) > 1
    runner = Runner(*loaded, Folder(tmp_path / "out"), batch=2)
    lines = compute(runner, todo)
    assert len(lines) == sum(unit.lines for unit in todo) == 3 * 2 * 3
    assert len(list((tmp_path / "out").rglob("*.jsonl"))) == 2 * 3
    assert units(Runner(*loaded, Folder(tmp_path / "out"), batch=2), GRID) == []
    more = units(Runner(*loaded, Folder(tmp_path / "out"), batch=2), replace(GRID, samples=4))
    assert [(unit.job.length, len(unit.places)) for unit in more] == [(320, 1), (400, 1)]
    cells = read_cells(tmp_path / "out")
    assert sorted((c.method, c.length, c.n) for c in cells) == sorted((m, n, 3) for m in GRID.methods for n in GRID.lengths)
    write_cells(cells, tmp_path / "cells.jsonl")
    assert read_cells(tmp_path / "cells.jsonl") == [
        replace(
            c, scores={p: round(s, 6) for p, s in c.scores.items()}, means={k: v and round(v, 6) for k, v in c.means.items()}
        )
        for c in cells
    ]
    probed = [replace(line, setting=replace(line.setting, probe=2), recall_at_k=0.25) for line in lines]
    twice = cells_of([*lines, *probed])
    assert [(c.n, c.means["recall_at_k"]) for c in twice] == [(3, 0.25)] * len(cells)


def test_what_other_options_gave_is_made_again(
    loaded: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = replace(GRID, methods=("full", "oracle"), lengths=(320,))
    runner = Runner(*loaded, Folder(tmp_path), batch=2)
    lines = compute(runner, units(runner, grid))
    monkeypatch.setattr(variant, "digest", lambda method: {"oracle": "other"}.get(method.name, digest(method)))
    folder = Folder(tmp_path)
    runner = Runner(*loaded, folder, batch=2)
    todo = units(runner, grid)
    assert [(len(unit.places), [one.method for one in unit.variants]) for unit in todo] == [(1, ["oracle"]), (2, ["oracle"])]
    assert folder.outdated == {"oracle": 3}
    assert len(read_cells(tmp_path)) == 2  # still a report of what was
    compute(runner, todo[1:])
    assert {(c.method, c.n) for c in read_cells(tmp_path)} == {("full", 3), ("oracle", 2)}  # of one kind
    assert [len(unit.places) for unit in units(runner, grid)] == [1]
    old = [json.loads(line.to_json()) for line in lines]
    for record in old:
        del record["setting"]["options"]  # as it was written before options were kept
    folder = Folder(tmp_path / "old")
    folder.extend(Line.from_json(json.dumps(record)) for record in old)
    assert units(Runner(*loaded, Folder(tmp_path / "old")), grid) == []


def test_every_cell_has_its_first_samples_before_any_has_its_next(
    loaded: tuple[Any, Any],
) -> None:
    between = Stretch(Course((64,)), (0,), (FULL,))
    todo = units(Runner(*loaded, batch=2), replace(GRID, samples=4), [between])
    found = [(one.job.length, [seed for seed, _ in one.places]) if isinstance(one, Unit) else None for one in todo]
    assert found == [(320, [0, 1]), (400, [0, 1]), None, (320, [2, 3]), (400, [2, 3])]
    assert units(Runner(*loaded, batch=None), replace(GRID, tasks=()), [between]) == [between]


@dataclass(frozen=True, slots=True)
class Dying(Source):
    """A worker's model whose process is killed in the first unit that anyone computes."""

    marker: str = ""

    def bench(self) -> Bench:
        bench = Source.bench(self)
        runner = bench.runner
        inner = runner.compute

        def compute(unit: Unit, *args: Any) -> Any:
            for number, lines in enumerate(inner(unit, *args)):
                if number and not os.path.exists(self.marker):
                    Path(self.marker).touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                yield lines

        runner.compute = compute  # type: ignore[method-assign, assignment]
        return bench


def test_processes_give_the_same_lines_and_survive_a_death(folder: Path, loaded: tuple[Any, Any], tmp_path: Path) -> None:
    runner = Runner(*loaded, name=str(folder), batch=2)
    todo = units(runner, GRID)
    source = Dying(str(folder), "cpu", "float32", 2, str(tmp_path / "marker"))
    given = list(work(source, todo, jobs=2))
    assert (tmp_path / "marker").exists()
    assert not any(isinstance(one, Failure) for one in given)
    lines = [line for one in given if isinstance(one, list) for line in one]
    assert plain(lines) == plain(compute(runner, todo))
    wrong = Unit(Job("passkey", 20, 1), ((0, 0.0),), (FULL,))
    (failure,) = work(Source(str(folder), "cpu", "float32"), [wrong], jobs=1)
    assert isinstance(failure, Failure)
    assert "length 20 is too short" in failure.why
    assert list(work(source, todo, jobs=2, seconds=0.0)) == []
    with pytest.raises(KvthawError, match="no such folder"):
        list(work(Source(str(folder / "none"), "cpu", "float32"), todo, jobs=1))
    with pytest.raises(ConfigError, match="jobs is 0"):
        list(work(source, todo, jobs=0))


def test_the_last_units_are_shared_by_their_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "LEAST", 2)
    variants = tuple(Variant("oracle", budget) for budget in range(1, 8))
    left = deque(Unit(Job("passkey", length, 1), ((0, 0.0),), variants) for length in (100, 200, 300))
    taken: list[Unit] = []
    while (unit := workers._take(left, jobs=3)) is not None:
        taken.append(unit)
    sizes = [(unit.job.length, len(unit.variants)) for unit in taken]
    assert sizes == [(100, 7), (200, 3), (300, 3), (200, 2), (300, 2), (200, 2), (300, 2)]
    for length in (200, 300):
        assert tuple(v for unit in taken if unit.job.length == length for v in unit.variants) == variants


@pytest.fixture(scope="module")
def document() -> Document:
    return overview([*toy(), cell("quest", 256, [1.0] * 3, dense_layers=2)])


def test_the_report_holds_every_cell_and_asks_for_nothing(document: Document) -> None:
    page, text = document.html(), document.markdown()
    assert {one for one in re.findall(r"https?://[^\s\"'<>)]*", page) if "www.w3.org" not in one} == set()
    assert not re.search(r"<script|<link|src=\"(?!data:)|url\(http", page)
    for name in ("full", "oracle", *SUBJECTS, *BASELINES):
        assert f"<td>{name}</td><td>" in page
        assert f"| {name} | " in text
    maps = page.count("accuracy by depth (down)")
    assert maps == 2 * 3  # two tasks at 64 and 256, and at 256 with dense layers
    assert page.count("<svg") == maps + 2 * 3  # by budget, bytes and recall under two protocols
    assert "prkv at 256 keeps 99 % of full" in text
    assert "90 (60 to 98, n=10)" in text
    with pytest.raises(ConfigError, match="of 2 settings"):
        overview([*toy(), cell("quest", 64, [1.0], about=("other", *ABOUT[1:]))])


def test_names_are_text_in_both_forms_of_the_report() -> None:
    about = ("<script>alert(1)</script>", *ABOUT[1:])
    document = overview([cell("full", None, [1.0], about=about), cell("quest", 64, [1.0], task="a|b<i>", about=about)])
    for text in (document.html(), document.markdown()):
        assert "<script" not in text
        assert "<i>" not in text


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_opens_in_a_browser(document: Document, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    path = tmp_path / "report.html"
    path.write_text(document.html(), encoding="utf-8")
    quiet = [
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    ]
    shared = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", *quiet, f"--user-data-dir={tmp_path / 'user'}"]
    done = subprocess.run([*shared, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.count("<details") == done.stdout.count("</details>") > 5
    assert done.stdout.count('<details open="">') == 1  # the goals that are not met
    assert done.stdout.rstrip().endswith("</body></html>")
    assert "icecache at 64 equals quest at 256" in done.stdout


def test_the_command_runs_continues_and_reports(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = ["compare", "--task", "passkey,perplexity", "--methods", "oracle,streaming", "--budgets", "64", "--lengths", "320"]
    asked += ["--samples", "2", "--model", str(folder), "--device", "cpu", "--out", str(out), "--json"]
    first = CliRunner().invoke(app, asked)
    assert first.exit_code == 0, first.output
    assert {json.loads(line)["goal"] for line in first.stdout.splitlines()} == {goal.text for goal in goals(toy())}
    written = {path.name for path in out.iterdir()}
    assert written == {"lines", "stretches", "cells.jsonl", "cells-perplexity.jsonl", "report.html", "report.md"}
    table = (out / "report.md").read_text().partition("## Perplexity")[2]
    assert {row.split("|")[1].strip() for row in table.splitlines() if ", n=1 " in row} == {"full", "oracle", "streaming"}
    assert " nats (" in table
    before = {path: path.stat().st_mtime_ns for path in (out / "lines").rglob("*.jsonl")}
    again = CliRunner().invoke(app, [*asked[:-1], "--samples", "2"])
    assert again.exit_code == 0, again.output
    assert {path: path.stat().st_mtime_ns for path in (out / "lines").rglob("*.jsonl")} == before
    alone = CliRunner().invoke(app, ["compare", "--report", "only", "--out", str(out / "cells.jsonl")])
    assert alone.exit_code == 0, alone.output
    assert (out / "cells.html").read_text() == (out / "report.html").read_text()
    wrong = CliRunner().invoke(app, ["compare", "--protocol", "dense,both", "--out", str(out)])
    assert wrong.exit_code == 2
    assert "Invalid value for --protocol: 'both' is not one of: dense, sparse" in wrong.output
    empty = CliRunner().invoke(app, ["compare", "--report", "only", "--out", str(tmp_path / "nothing")])
    assert empty.exit_code == 1
