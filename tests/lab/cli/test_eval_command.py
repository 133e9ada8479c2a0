"""python -m lab eval TASK."""

from __future__ import annotations

from pathlib import Path

import pytest

from forked import forked
from said import Said, refused

FIELDS = {"task", "method", "budget", "retrieved", "length", "n", "accuracy", "full_accuracy", "attention_mass", "recall_at_k"}
FIELDS |= {"hit_rate", "kv_device_bytes", "kv_host_bytes", "ttft_s", "tpot_s", "dense_layers", "attended_mean", "attended_max"}
FIELDS |= {"seed", "question", "versions"}
ORACLE = ("--method", "oracle", "--budget", "64")


def test_eval_prints_one_object_a_run(model: str, tmp_path: Path) -> None:
    out, plot = tmp_path / "out.jsonl", tmp_path / "plot.png"
    arguments = ["eval", "passkey", "--model", model, "--method", "full,oracle", "--method", "streaming", "--budget", "64,128"]
    arguments += ["--length", "300,500", "--samples", "2", "--out", str(out)]
    said = Said(*arguments, "--json", "--plot", str(plot))
    assert said.code == 0
    assert len(said.records) == 2 * (1 + 2 * 2)
    for record in said.records:
        assert set(record) >= FIELDS
        assert record["n"] == 2
    assert [(r["method"], r["budget"]) for r in said.records[:5]] == [
        ("full", None),
        ("oracle", 64),
        ("oracle", 128),
        ("streaming", 64),
        ("streaming", 128),
    ]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert len(out.read_text().splitlines()) == 2 * 2 * 5
    table = Said(*arguments)
    assert len(out.read_text().splitlines()) == 2 * 2 * 5
    assert "accuracy" in table.out
    assert table.out.count("streaming") == 4


def test_eval_prefills_a_prompt_once(model: str, tmp_path: Path) -> None:
    arguments = ("eval", "passkey", *ORACLE, "--model", model, "--length", "300", "--samples", "2")
    plain, kept, again = (Said(*arguments, "--json", *more) for more in ((), *[("--kv-dir", str(tmp_path / "kv"))] * 2))
    assert {said.records[0]["accuracy"] for said in (plain, kept, again)} == {plain.records[0]["accuracy"]}
    assert len(list((tmp_path / "kv").iterdir())) in (1, 2)
    assert "damaged" not in again.err


def test_eval_keeps_questions_apart(model: str, tmp_path: Path) -> None:
    asked = ("--method", "streaming", "--budget", "64", "--length", "400", "--samples", "1", "--question", "dense,sparse")
    said = Said("eval", "passkey,passkey_book", "--model", model, *asked, "--plot", str(tmp_path / "a.png"))
    assert said.code == 0, said.err
    assert said.out.count("question dense") == said.out.count("question sparse") == 1
    assert said.out.count("streaming") == 2
    finished = [line.partition(":")[0] for line in said.err.splitlines() if "1 of 1" in line]
    assert finished == [f"{task}, question {of} 400" for task in ("passkey", "passkey_book") for of in ("dense", "sparse")]


def test_eval_takes_dense_layers_and_the_sparse_question(model: str) -> None:
    arguments = (*ORACLE, "--model", model, "--length", "400", "--samples", "1", "--depths", "50")
    arguments += ("--method", "quest:retrieved=20,sink=4:dense_layers=0")
    said = Said("eval", "passkey", *arguments, "--dense-layers", "0,1", "--question", "sparse", "--seed", "7", "--json")
    *oracle, quest = said.records
    assert (quest["method"], quest["budget"]) == ("quest:sink=4", 4 + 16 + 16 + 20)
    assert [(r["dense_layers"], r["question"], r["seed"]) for r in oracle] == [(0, "sparse", 7), (1, "sparse", 7)]
    assert said.records[0]["kv_dense_bytes"] == 0 < said.records[1]["kv_dense_bytes"]


def test_tables_show_the_limit_that_was_asked_for(model: str) -> None:
    """Not the budget that the method's own regions make of it."""
    asked = ("--model", model, "--method", "quest:retrieved=20", "--length", "300", "--samples", "1")
    assert "20 retrieved" in Said("eval", "passkey", *asked).out
    assert "20 retrieved" in Said("eval", "perplexity", *asked, "--measured", "2").out


def test_eval_takes_options_before_the_task(model: str) -> None:
    arguments = ("--samples", "1", "--length", "300", "--model", model, "--method", "streaming", "--json")
    told = [
        Said("eval", *arguments, "passkey"),
        Said("eval", "passkey", *arguments),
        Said("eval", "task", "passkey", *arguments),
    ]
    assert [[record["n"] for record in said.records] for said in told] == [[1]] * 3


def test_eval_takes_suites_texts_and_files(model: str, tmp_path: Path) -> None:
    text, stories, plot = tmp_path / "snow.txt", tmp_path / "qa4_x_test.txt", tmp_path / "heat.png"
    text.write_text("Snow fell. Nobody spoke! Why? " * 9)
    stories.write_text("1 The office is west of the garden.\n2 What is west of the garden?\toffice\t1\n")
    common = ("--model", model, "--method", "streaming", "--budget", "64", "--samples", "1", "--probe", "0")
    given = ("--length", "1000", "--text", str(text), "--data", f"babilong-qa4={tmp_path}", "--plot", str(plot))
    said = Said("eval", "passkey,babilong_qa4", *common, *given)
    assert said.code == 0
    assert all(word in said.out for word in ("passkey", "babilong", "mean", "streaming", "full"))  # full was not asked for
    assert plot.read_bytes().startswith(b"\x89PNG")
    json_said = Said("eval", "niah,babilong-qa4", *common, "--length", "1000", "--json", "--data", f"babilong={tmp_path}")
    assert [record["task"] for record in json_said.records] == ["niah_single", "babilong_qa4"]


def test_eval_refuses_files_before_it_loads(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("no config that anything could load")
    gone = ("--model", str(folder))
    refused(Said("eval", "longeval", *gone, "--data", "nowhere"), 1, "nowhere", "no such file")
    refused(Said("eval", "passkey", *gone, "--data", str(tmp_path)), 1, "passkey is generated")
    refused(Said("eval", "passkey", *gone, "--data", f"longeval={tmp_path}"), 2, "longeval is not among the tasks")
    refused(Said("eval", "babilong", *gone, "--data", str(folder)), 1, "holds no file qa1_")
    refused(Said("eval", "passkey,rulers", *gone), 2, "'rulers'", "ruler_vt")


@pytest.mark.slow
def test_two_processes_share_the_work(model: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out.jsonl")
    asked = ["eval", "passkey", "--model", model, "--method", "oracle", "--length", "300", "--samples", "3", "--out", out]
    with forked(*asked, "--shard", "1/2") as first, forked(*asked, "--shard", "2/2") as second:
        assert all("the same command without --shard" in process.stderr.read() for process in (first, second))
        assert (first.wait(), second.wait()) == (0, 0)
    assert len(Path(out).read_text().splitlines()) == 2 * 3
    assert [(record["method"], record["n"]) for record in Said(*asked, "--json").records] == [("oracle", 3)]
