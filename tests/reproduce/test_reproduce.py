"""The papers' tables and figures: what each name measures, prints and draws, as small as can be."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvthaw import ConfigError
from kvthaw.bench import steps
from kvthaw.bench.shapes import SHAPES
from kvthaw.engine.hf.model import load
from kvthaw.evaluate.results import Record, ResultsFile
from kvthaw.evaluate.variant import read_variant
from kvthaw.methods import METHODS
from lab.bench.settings import setting
from lab.cli.reproduce import tables
from lab.reproduce import EXPERIMENTS, PAPERS, Lab, check, named, run
from lab.reproduce.draw import picture
from lab.reproduce.experiment import Experiment, Measurement, Table, table
from lab.reproduce.plans import Asked, Read, Score, Scores
from lab.reproduce.special import Special, Together, shares
from lab.reproduce.watched import View, Watched
from timed import tinier

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def lab(folder: Path) -> Any:
    """A quick laboratory that all names share: what one measured another need not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "tiny", tinier())
        patch.setattr(steps, "most_warm", lambda device: 2)
        yield Lab(str(folder), load, quick=True)


DRAWN = {(one.form, paper): one.name for paper, each in PAPERS.items() for one in reversed(each)}
"""A name of each form of each paper."""


def shortened(one: Experiment) -> Experiment:
    """With a third of the methods, where another of the paper's tables has the form; the options of all are read."""
    (about, said), *_ = one.says.items()
    methods = [row for row in said.rows if row.partition(":")[0] in METHODS]
    for row in methods:
        read_variant(row)
    left = {row: cells for row, cells in said.rows.items() if row not in methods or row in methods[::3]}
    return replace(one, says={about: Table(said.columns, left)})


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_name_runs_quick(name: str, lab: Lab) -> None:
    one = EXPERIMENTS[name] if name in DRAWN.values() else shortened(EXPERIMENTS[name])
    outcome = run(one, lab)
    lines = outcome.lines()
    assert [line["row"] for line in lines] == list(outcome.said.rows)
    assert any(line["ours"] for line in lines)
    assert not outcome.left_out
    assert all(set(line["ours"]) <= set(line["paper"]) == set(outcome.said.columns) for line in lines)
    assert all(line["ours_on"].startswith("NOT comparable") or not line["ours"] for line in lines)
    told = [] if one.plan.needs == "nothing" else [(cell.on, cell.value) for cell in outcome.cells.values()]
    assert len(told) == len(set(told)), "one measurement stands in several places"
    if name in DRAWN.values():
        drawn = picture(outcome)
        assert one.title in drawn.get_suptitle()
        assert not any(axes.get_legend() for axes in drawn.axes), "it stands below, where it hides nothing"
    shown = StringIO()
    Console(file=shown, width=80).print(tables(outcome)[1])
    assert len(shown.getvalue().splitlines()) < 8 + 6 * len(outcome.said.rows), "a column of single words"


@pytest.mark.gpu
@pytest.mark.parametrize("name", [one.name for one in EXPERIMENTS.values() if one.plan.needs == "a GPU"])
def test_what_needs_no_weights_runs_quick_on_a_gpu(name: str) -> None:
    assert run(EXPERIMENTS[name], Lab(None, load, quick=True)).cells


def test_names_stand_for_papers_and_for_all() -> None:
    assert [one.name for one in named("all")] == list(EXPERIMENTS)
    assert [one.name for one in named("IceCache,icecache-t1")][-1] == "icecache-t1"
    assert {name.rpartition("-")[0] for name in EXPERIMENTS} == set(PAPERS)
    with pytest.raises(ConfigError, match="did you mean 'icecache-t1'"):
        list(named("icecache-t11"))


def test_a_second_run_reads_the_first_ones_results(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    first = run(EXPERIMENTS["icecache-t3"], Lab(str(folder), load, ResultsFile(out), quick=True))
    written = out.read_bytes()
    assert run(EXPERIMENTS["icecache-t3"], Lab(str(folder), load, ResultsFile(out), quick=True)).cells == first.cells
    assert out.read_bytes() == written


def test_the_papers_numbers_are_those_of_the_model() -> None:
    one = EXPERIMENTS["icecache-t1"]
    assert one.said("mistralai/Mistral-7B-Instruct-v0.2")[1].rows["full"]["NrtvQA"] == 26.8
    assert one.said("somebody/another")[0] == "Llama-3.1-8B-Instruct"


def test_what_a_full_run_lacks_is_said(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--model"):
        run(EXPERIMENTS["icecache-t3"], Lab(None, load))
    with pytest.raises(ConfigError, match="gsm8k needs its data"):
        run(EXPERIMENTS["icecache-t3"], Lab(str(folder), load))


def test_times_of_a_gpu_are_read_where_there_is_none() -> None:
    one, same = (
        EXPERIMENTS["clusterkv-f12"],
        {"prompt": "run", "dense_layers": None, "seed": 0, "device": "some GPU", "budget": 256},
    )
    sizes = {
        "shape": "llama-3.1-8b",
        "length": 32 * 1024,
        "batch": 1,
        "new_tokens": 1024,
        "steps": "captured",
        "retrieved": None,
    }
    taken = {"ttft_s": 2.0, "tpot_s": 0.01, "elapsed_s": {"256": 2.5, "512": 5.0, "1024": 10.24}}
    results = ResultsFile()
    results.add(Record(setting("full", **same, **sizes).to_dict(), taken))
    (full, *others) = run(one, Lab(None, load, results, known="some GPU")).lines()
    assert full["ours"] == {"32k+256": 4.5, "32k+512": 7.0, "32k+1024": pytest.approx(12.24)}
    assert not any(line["ours"] for line in others)
    with pytest.raises(ConfigError, match="nothing of it"):
        run(one, Lab(None, load, results, known="another GPU"))


def test_data_that_is_missing_is_named_before_anything_runs(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "aime24.jsonl").write_text('{"id": "1", "problem": "1 + 1", "answer": "2"}\n')
    lab = Lab(str(folder), load, data=str(tmp_path))
    wanted = [EXPERIMENTS["prkv-t1"], EXPERIMENTS["icecache-t3"]]  # the first reads aime24, then math500
    with pytest.raises(ConfigError, match=r"math500: .* none of test\.jsonl.*gsm8k: .* none of gsm8k\.jsonl"):
        check(wanted, lab)
    with pytest.raises(ConfigError, match=r"math500: .* none of test\.jsonl"):
        run(wanted[0], lab)
    assert not list(lab.results)


SHORT = Asked({"short": ("passkey", 400), "long": ("passkey", 10**6)}, 1, (0.5,))
PARTIAL: dict[str, tuple[Measurement, tuple[str, ...], list[str]]] = {
    "asked": (SHORT, ("short", "long"), ["short"]),
    "read": (Read((64, 10**6), 2, 1), ("64", "1000000", "deviation"), ["64"]),
    "watched": (
        Watched({of: View("text", n, 2, "attention_mass") for of, n in (("short", 200), ("long", 10**6))}),
        ("short", "long"),
        ["short"],
    ),
    "together": (
        Together(((replace(SHORT, columns={"short": ("passkey", 400)}), ()), (Read((10**6,), 2, 1), ()))),
        ("short", "1000000"),
        ["short"],
    ),
    "special": (
        Special(shares, ("short", "long"), "", {"lengths": {"short": 400, "long": 10**6}, "prompt": "passkey", "samples": 1}),
        ("short", "long"),
        ["short"],
    ),
}


@pytest.mark.parametrize("name", PARTIAL)
def test_a_column_beyond_the_model_s_positions_is_left_out_with_a_sentence(name: str, folder: Path) -> None:
    plan, columns, measured = PARTIAL[name]
    told: list[str] = []
    lab = Lab(str(folder), load, limit=1, note=told.append)
    said = Table(columns, {"streaming:budget=64": dict.fromkeys(columns)})
    one = Experiment("a-t1", "a", "a", {"a": said}, plan, "%")
    (line,) = run(one, lab).lines()
    assert list(line["ours"]) == measured
    (why,) = line["left_out"]
    assert told == [why]
    assert run(one, lab).left_out == (why,), "nor does a second run, which reads results, hide it"
    assert why.startswith(f"{columns[1]} left out: the prompt has ")
    assert "positions end at" in why


def test_where_every_column_is_left_out_the_error_says_why(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"nothing of it could be measured here.*10k.* left out: the prompt has .*positions end"
    ):
        run(EXPERIMENTS["icecache-f6"], Lab(str(folder), load, limit=1))


def test_a_mean_says_what_it_is_of(folder: Path, tmp_path: Path) -> None:
    for name in ("trec", "lcc"):
        record = {
            "_id": "1",
            "input": "1?",
            "context": "1.",
            "answers": ["1"],
            "all_classes": ["1"],
            "length": 1,
            "dataset": name,
        }
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(record) + "\n")
    scores = {"a": Score("longbench_trec"), "b": Score("longbench_lcc"), "mean": Score("")}
    plan = Scores(scores, new_tokens={"longbench_trec": 2, "longbench_lcc": 2}, mean="mean")
    said = Table(tuple(scores), {"streaming:budget=64": dict.fromkeys(scores)})
    outcome = run(Experiment("a-t1", "a", "a", {"a": said}, plan, "%"), Lab(str(folder), load, data=str(tmp_path)))
    assert outcome.cells["streaming:budget=64", "a"].on.endswith("longbench_trec, n=1")
    assert outcome.cells["streaming:budget=64", "mean"].on.endswith("the mean of 2 columns")


def test_icecache_s_budget_is_a_query_head_s(folder: Path) -> None:
    """So that the union of what the heads find is not cut; other methods and the other papers count for a KV head."""
    lab = Lab(str(folder), load)
    config = lab.loaded[0].config
    group = config.num_attention_heads // config.num_key_value_heads
    assert group > 1
    variant = lab.variant("icecache:budget=64", each_head=True)
    assert variant.method == "icecache:merge=each:sink=4:window=16:buffer=8"
    assert (variant.budget, variant.retrieved) == (None, group * 36)
    variant = lab.variant("icecache-reuse:budget=256", each_head=True)
    assert (variant.method[:25], variant.retrieved) == ("icecache-reuse:merge=each", group * 176)
    assert lab.variant("icecache:budget=0.1", each_head=True).budget == group * 0.1
    assert lab.variant("icecache:budget=64") == read_variant("icecache:budget=64")
    assert lab.variant("pqcache:budget=64", each_head=True) == read_variant("pqcache:budget=64")
    plans = {name: one.plan for name, one in EXPERIMENTS.items()}
    assert all(getattr(plans[f"icecache-{name}"], "each_head", False) for name in ("t1", "t2", "t3", "t4", "t5", "t6", "f6"))


def test_a_table_is_read_by_its_lines() -> None:
    read = table("a b\nfull 1.5 OOM\nquest:page=32 - 2")
    assert read.columns == ("a", "b")
    assert read.rows == {"full": {"a": 1.5, "b": "OOM"}, "quest:page=32": {"a": None, "b": 2.0}}
    with pytest.raises(ValueError, match="1 values for 2 columns"):
        table("a b\nfull 1")
