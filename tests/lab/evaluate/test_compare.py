"""A comparison: what is run, in shards, and the report."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvthaw.errors import ConfigError, KvthawError
from kvthaw.evaluate import variant
from kvthaw.evaluate.results import Record, ResultsFile
from kvthaw.methods.options import digest
from lab.__main__ import app
from lab.evaluate.compare import Grid, run, summaries
from lab.evaluate.document import Document
from lab.evaluate.metrics import paired
from lab.evaluate.overview import overview
from lab.evaluate.perplexity import Course, Reader
from lab.evaluate.runner import Runner

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
GRID = Grid(("passkey",), ("full", "oracle", "streaming"), (64,), (320, 400), samples=3, depths=(0.0, 0.5))


def compute(
    loaded: tuple[Any, Any], path: Path | None, grid: Grid = GRID, courses: Sequence[Course] = (), **how: Any
) -> ResultsFile:
    results = ResultsFile(path)
    runner, reader = Runner(*loaded, results, batch=2), Reader(*loaded, results, batch=2)
    run([*((runner, job) for job in grid.jobs()), *((reader, one) for one in courses)], grid.variants(), **how)
    return results


def plain(results: ResultsFile) -> list[tuple[str, Any, float]]:
    return sorted((one.key, one["output"], one["accuracy"]) for one in results)


def test_what_is_there_is_not_run_again(loaded: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.jsonl"
    results = compute(loaded, path)
    assert len(path.read_text().splitlines()) == len(list(results)) == 3 * 2 * 3
    more = compute(loaded, path, replace(GRID, samples=4))
    assert len(path.read_text().splitlines()) == len(list(more)) == 3 * 2 * (3 + 1)
    monkeypatch.setattr(Runner, "compute", lambda *_: pytest.fail("computed again"))
    assert plain(compute(loaded, path)) == plain(more)


def test_all_jobs_get_their_first_samples_before_any_gets_its_next(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    grid = replace(GRID, samples=4, methods=("full",))
    made = compute(loaded, tmp_path / "results.jsonl", grid, [Course(64, steps=2)])
    found = [(one["length"], one["seed"]) for one in made]
    assert found == [(320, 0), (320, 1), (400, 0), (400, 1), (64, 0), (320, 2), (320, 3), (400, 2), (400, 3)]


def test_shards_are_all_of_it(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    path, told = tmp_path / "results.jsonl", list[str]()
    for shard in ((1, 3), (2, 3), (3, 3)):
        compute(loaded, path, shard=shard, tell=lambda doing, *_: told.append(doing))
    assert plain(ResultsFile(path)) == plain(compute(loaded, None))
    assert any("prefill" in one for one in told)


def test_what_other_options_gave_is_made_again(
    loaded: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, grid = tmp_path / "results.jsonl", replace(GRID, methods=("full", "oracle"), lengths=(320,))
    first = [json.loads(record.to_json()) for record in compute(loaded, path, grid)]
    monkeypatch.setattr(variant, "digest", lambda method: {"oracle": "other"}.get(method.name, digest(method)))
    again = compute(loaded, path, grid)
    assert again.outdated == {"oracle": 3}
    assert len(path.read_text().splitlines()) == 6 + 3
    for record in first:
        del record["setting"]["options"]  # as it was written before options were kept
    old = tmp_path / "old.jsonl"
    old.write_text("".join(json.dumps(record) + "\n" for record in first))
    assert compute(loaded, old, grid).outdated == {}
    assert len(old.read_text().splitlines()) == 6


def test_a_piece_that_fails_leaves_the_others_their_turn(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with pytest.raises(KvthawError, match=r"2 pieces gave no results(.|\n)*passkey 20: length 20 is too short"):
        compute(loaded, path, replace(GRID, lengths=(20, 320), samples=3, methods=("full",)))
    assert {one["length"] for one in ResultsFile(path)} == {320}


def record(method: str, budget: int | None, seed: int, accuracy: float, **other: Any) -> Record:
    about = dict.fromkeys(("model", "weights", "dtype", "device", "kvthaw", "source"), "toy")
    setting = {"task": "passkey", "length": 4096, "question": "dense", "retrieved": None, "dense_layers": 0, "probe": 0}
    nothing = dict.fromkeys(("attention_mass", "recall_at_k", "output_error", "hit_rate", "attended_mean", "attended_max"))
    nothing |= dict.fromkeys(("prefill_s", "index_s", "ttft_s", "tt2t_s", "tpot_s", "held_budget"))
    bytes_ = dict.fromkeys(("kv_device_bytes", "kv_dense_bytes", "kv_host_bytes"), 1 << 20)
    own = {"method": method, "budget": budget, "seed": seed, "depth": 0.5}
    return Record({**about, **setting, **own, **other}, {**nothing, **bytes_, "accuracy": accuracy, "versions": {}})


def toy(**other: Any) -> list[Record]:
    """Full attention is always right, quest nine times in ten at 64 tokens, always at 256; streaming was given fewer samples."""
    found = [record("full", None, seed, 1.0, **other) for seed in range(10)]
    found += [record("quest", 64, seed, float(seed > 0), **other) for seed in range(10)]
    found += [record("quest", 256, seed, 1.0, **other) for seed in range(10)]
    return found + [record("streaming", 64, seed, 0.0, **other) for seed in range(3)]


def test_summaries_pair_samples_with_full_attention() -> None:
    every = summaries(toy())
    assert every.perplexities == every.benchmarks == every.agreements == []
    found = {(one["method"], one["budget"]): one for one in every.tasks}
    assert [found[key]["n"] for key in (("full", None), ("quest", 64), ("streaming", 64))] == [10, 10, 3]
    assert found["quest", 64]["accuracy"] == 0.9
    assert found["quest", 64]["difference"][0] == pytest.approx(-0.1)
    low, high = found["quest", 64]["difference"][1:]
    assert low < -0.1 < high
    assert found["streaming", 64]["difference"][0] == -1.0
    with pytest.raises(ConfigError, match="of 2 settings"):
        summaries([*toy(), record("quest", 64, 0, 1.0, model="other")])


@pytest.fixture(scope="module")
def document() -> Document:
    return overview(summaries([*toy(), *toy(length=8192), *toy(question="sparse")]))


def test_the_report_has_tables_first_and_asks_for_nothing(document: Document) -> None:
    page, text = document.html(), document.markdown()
    assert {one for one in re.findall(r"https?://[^\s\"'<>)]*", page) if "www.w3.org" not in one} == set()
    assert not re.search(r"<script|<link|src=\"(?!data:)|url\(http", page)
    for name in ("full", "quest", "streaming"):
        assert f"| {name} | " in text
    assert page.count("<h2>Accuracy") == 2
    assert page.index("<table") < page.index("<svg")
    assert "90 (60 to 98, n=10)" in text
    assert "-10.0 (" in text


def test_the_report_names_rows_and_pools_the_samples_of_all_lengths() -> None:
    rows = [record("quest", None, seed, 1.0, retrieved=100) for seed in range(10)]
    text = overview(summaries([*toy(), *toy(length=8192), *rows])).markdown()
    assert "| quest | 100 retrieved | 0 |" in text
    _, low, high = paired([-1.0, *[0.0] * 9] * 2)
    assert f"-10.0 ({100 * low:+.1f} to {100 * high:+.1f}, n=20)" in text


def test_the_report_has_times_and_no_folders_of_the_machine() -> None:
    timed = [Record(one.setting, {**one.measures, "step_s": 0.0125, "rows": 10}) for one in toy(model="/home/me/models/mine")]
    document = overview(summaries(timed))
    for text in (document.html(), document.markdown()):
        assert "/home" not in text
        assert "12.5" in text
        assert "up to 10 samples" in text
    assert "Model mine (" in document.markdown()


def test_names_are_text_in_both_forms_of_the_report() -> None:
    document = overview(summaries(toy(model="<script>alert(1)</script>", task="a|b<i>")))
    for text in (document.html(), document.markdown()):
        assert "<script" not in text
        assert "<i>" not in text


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_opens_in_a_browser(document: Document, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    path = tmp_path / "report.html"
    path.write_text(document.html(), encoding="utf-8")
    quiet = ["--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update"]
    shared = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", *quiet, f"--user-data-dir={tmp_path / 'user'}"]
    done = subprocess.run([*shared, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.count("<details") == done.stdout.count("</details>") == 2 + 1
    assert done.stdout.rstrip().endswith("</body></html>")


def test_the_command_runs_continues_and_reports(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.evaluate.perplexity.Course", partial(Course, steps=8))
    out = tmp_path / "made" / "out"
    asked = ["compare", "passkey,perplexity", "--method", "oracle,streaming", "--budget", "64", "--length", "320"]
    asked += ["--samples", "2", "--model", str(folder), "--device", "cpu", "--out", str(out)]
    part = CliRunner().invoke(app, [*asked, "--shard", "1/2"])
    assert part.exit_code == 0, part.output
    assert {path.name for path in out.iterdir()} == {"results.jsonl"}
    first = CliRunner().invoke(app, [*asked, "--json"])
    assert first.exit_code == 0, first.output
    lines = [json.loads(line) for line in first.stdout.splitlines()]
    assert {(line["method"], line.get("task")) for line in lines} == {
        (name, task) for name in ("full", "oracle", "streaming") for task in ("passkey", None)
    }
    assert {path.name for path in out.iterdir()} == {"results.jsonl", "report.html", "report.md"}
    assert " nats (" in (out / "report.md").read_text().partition("## Perplexity")[2]
    before = (out / "results.jsonl").read_text()
    again = CliRunner().invoke(app, asked)
    assert again.exit_code == 0, again.output
    assert "accuracy" in again.stdout
    assert (out / "results.jsonl").read_text() == before
    alone = CliRunner().invoke(app, ["compare", "--report-only", "--out", str(out)])
    assert alone.exit_code == 0, alone.output
    wrong = CliRunner().invoke(app, ["compare", "--question", "dense,both", "--out", str(out)])
    assert wrong.exit_code == 2
    assert "Invalid value for --question: 'both' is not one of: dense, sparse" in wrong.output
    assert CliRunner().invoke(app, ["compare", "--shard", "3/2", "--out", str(out)]).exit_code == 2
    bare = CliRunner().invoke(app, [*asked[:-1], str(tmp_path / "bare"), "--no-full", "--json"])
    assert {json.loads(line)["method"] for line in bare.stdout.splitlines()} == {"oracle", "streaming"}
    for folder in (tmp_path / "nothing", tmp_path / "nowhere" / "nothing"):
        empty = CliRunner().invoke(app, ["compare", "--report-only", "--out", str(folder)])
        assert empty.exit_code == 1
        assert not folder.parent.joinpath("nothing").exists()
        assert "holds no results of python -m lab compare" in " ".join(empty.output.split())


def test_two_texts_are_not_one_comparison(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder keeps to its text, and says so before a model is loaded; a folder that has two is not reported."""
    monkeypatch.setattr("lab.evaluate.perplexity.Course", partial(Course, steps=8))
    text, out = tmp_path / "own.txt", tmp_path / "out"
    text.write_text("The grass is green, and so is the sea. " * 60)
    asked = ["compare", "passkey,perplexity", "--method", "streaming", "--budget", "64", "--length", "320", "--samples", "1"]
    asked += ["--model", str(folder), "--device", "cpu", "--out"]
    assert CliRunner().invoke(app, [*asked, str(out)]).exit_code == 0
    before = (out / "results.jsonl").read_text()
    other = CliRunner().invoke(app, [*asked, str(out), "--text", str(text)])
    assert other.exit_code == 1
    assert "another text" in other.output
    assert (out / "results.jsonl").read_text() == before
    own = CliRunner().invoke(app, [*asked, str(tmp_path / "own"), "--text", str(text)])
    assert own.exit_code == 0, own.output
    (out / "results.jsonl").write_text(before + (tmp_path / "own" / "results.jsonl").read_text())
    mixed = CliRunner().invoke(app, ["compare", "--report-only", "--out", str(out)])
    assert mixed.exit_code == 1
    assert "another text" in mixed.output


def test_published_benchmarks_and_agreement_are_columns_of_the_report(folder: Path, tmp_path: Path) -> None:
    question = {"_id": "1", "input": "Who?", "context": "Alice went in. " * 40, "answers": ["Alice"], "all_classes": None}
    records = [{**question, "_id": str(i), "length": 1, "dataset": "qasper"} for i in range(3)]
    (tmp_path / "qasper.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    out = tmp_path / "out"
    asked = ["compare", "passkey,longbench_qasper,agreement", "--method", "streaming", "--budget", "64", "--length", "320"]
    asked += ["--samples", "2", "--model", str(folder), "--device", "cpu", "--out", str(out)]
    done = CliRunner().invoke(app, [*asked, "--data", f"longbench_qasper={tmp_path}", "--json"])
    assert done.exit_code == 0, done.output
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["n"] for one in found if one.get("benchmark") == "longbench_qasper"] == [2, 2]
    near = {one["method"]: one for one in found if "kl" in one}
    assert near["full"]["kl"] == 0 < near["streaming"]["kl"]
    assert near["full"]["n"] == 2, "a fifth of the samples of each, at least one"
    report = (out / "report.md").read_text()
    for part in report.split("\n## ")[1:3]:
        assert "| KL to full |" in part
        assert f"| {near['streaming']['kl']:.4f} |" in part
    assert "## Agreement with full attention" in report
    shown = CliRunner().invoke(app, ["compare", "--report-only", "--out", str(out)])
    assert all(words in shown.stdout for words in ("KL(full || method)", "longbench_qasper", "passkey"))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["agreement"], "name one"),
        (["passkey", "--data", "niah=book.txt"], "niah is not among the tasks"),
        (["gsm8k"], "gsm8k needs its data"),
        (["babilong", "--data", "nowhere"], "nowhere"),
    ],
)
def test_what_compare_cannot_ask_is_said_before_anything_is_made(asked: list[str], said: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["compare", *asked, "--out", str(tmp_path / "out")])
    assert done.exit_code in (1, 2)
    assert said in " ".join(done.output.split())
    assert not (tmp_path / "out").exists()


def test_a_task_s_questions_come_from_data(folder: Path, tmp_path: Path) -> None:
    lines = [{"ordered_kv_records": [[f"k{i}", f"v{i}"] for i in range(8)], "key": "k3", "value": "v3"}]
    path = tmp_path / "kv.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    out = tmp_path / "out"
    asked = [
        "compare",
        "kv-retrieval",
        "--data",
        f"kv-retrieval={path}",
        "--method",
        "full",
        "--samples",
        "1",
        "--length",
        "1k",
    ]
    done = CliRunner().invoke(app, [*asked, "--model", str(folder), "--device", "cpu", "--out", str(out)])
    assert done.exit_code == 0, done.output
    (record,) = ResultsFile(out / "results.jsonl")
    assert record["answers"] == ["v3"]
