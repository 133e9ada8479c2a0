"""The papers' tables on a pretrained model: what is measured where some data lack, in parts, and the files of LongBench."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvthaw import ConfigError
from kvthaw.engine.hf.model import load
from kvthaw.evaluate.results import ResultsFile
from lab import real_papers
from lab.evaluate.published import BENCHMARKS
from lab.longbench_files import main as write_files
from lab.longbench_files import record
from lab.reproduce import Lab
from lab.reproduce.experiment import Experiment, Table
from lab.reproduce.plans import Score, Scores

SCORES = {"a": Score("longbench_trec"), "b": Score("longbench_lcc"), "mean": Score("")}
PLAN = Scores(SCORES, new_tokens={"longbench_trec": 2, "longbench_lcc": 2}, mean="mean")
ROWS = ("streaming:budget=64", "oracle:budget=64", "full")
SAID = Table(tuple(SCORES), {row: {"a": 1.0, "b": 2.0, "mean": 3.0} for row in ROWS})
ONE = Experiment("icecache-t1", "a title", "a source", {"a": SAID}, PLAN, "%")
ABOUT = {"model": "tiny", "limit": None, "dtype": "float32", "gpu": "none", "commit": "abc"}


def test_parts_measure_what_the_whole_does_not_measure_again(folder: Path, tmp_path: Path) -> None:
    line = {"_id": "1", "input": "1?", "context": "1.", "answers": ["1"], "all_classes": ["1"]}
    (tmp_path / "trec.jsonl").write_text(json.dumps(line) + "\n")
    results = ResultsFile(tmp_path / "out.jsonl")
    lab = Lab(str(folder), load, results, data=str(tmp_path))
    seen: list[str] = []
    for number in range(2):
        made = list(real_papers.measure([real_papers.part(ONE, number, 2)], lab, ABOUT))
        assert all(set(one["ours"]) == {"a", "mean"} for one in made), "a mean of the columns whose data there are"
        seen += [one["row"] for one in made]
    assert sorted(seen) == sorted(ROWS)
    count = len(list(results))
    lines = list(real_papers.measure([ONE], lab, ABOUT))
    assert len(list(results)) == count > 0
    assert [one["row"] for one in lines] == list(ROWS)
    (why,) = lines[0]["left_out"]
    assert why.startswith("longbench_lcc left out: ")
    assert "longbench_trec, n=1" in lines[0]["ours_on"]


def test_lines_replace_those_of_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_papers, "ROOT", tmp_path)
    monkeypatch.setattr(real_papers, "RESULTS", tmp_path / "kept.jsonl")
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "reproduce.md"
    page.write_text(f"before\n{real_papers.BEGIN}\nold\n<!-- until here -->\nafter\n")
    base = {**ABOUT, "name": "icecache-t1", "title": "a title", "source": "a source", "unit": "%", "paper_on": "a model"}

    def lines(name: str, **values: float) -> Path:
        path = tmp_path / name
        rows = [base | {"row": row, "paper": {"a": 1.0, "b": None}, "ours": {"a": value}} for row, value in values.items()]
        path.write_text("".join(json.dumps(one) + "\n" for one in rows))
        return path

    lines("kept.jsonl", full=7.0, streaming=5.0)
    real_papers.publish([lines("new.jsonl", streaming=6.0)])
    text = page.read_text()
    assert "| `full` | 1 / 7 |" in text
    assert "| `streaming` | 1 / 6 |" in text
    assert "| b |" not in text, "a column that nobody measured"
    assert text.startswith("before")
    assert text.endswith("after\n")
    assert len((tmp_path / "kept.jsonl").read_text().splitlines()) == 2


def test_a_prompt_becomes_the_fields_that_make_it(tmp_path: Path) -> None:
    template = "Read. {context} Now: {input}\nAnswer:"
    row = {"task": "a", "idx": "3", "prompt": "Read. A Now: B. Now: Who?\nAnswer:", "gold": ["A"]}
    assert record(row, template) == {
        "_id": "a-3",
        "context": "A Now: B.",
        "input": "Who?",
        "answers": ["A"],
        "all_classes": None,
    }
    with pytest.raises(ConfigError, match="question 3 of a is not in the words"):
        record(row | {"prompt": "Read this. A Now: Who?\nAnswer:"}, template)


def test_files_ask_the_prompts_they_were_made_of(tmp_path: Path) -> None:
    prompts = {}
    for task in ("hotpotqa", "trec", "gov_report"):
        (item,) = BENCHMARKS[f"longbench_{task}"].items(
            [{"context": "Long.", "input": "Short?", "answers": ["a"], "all_classes": ["a", "b"]}]
        )
        prompts[task] = item.prompt
    rows = [
        {"task": task, "idx": "0", "prompt": prompt, "gold": {"answers": ["a"], "all_classes": ["a", "b"]}}
        for task, prompt in prompts.items()
    ]
    (tmp_path / "mini.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_files([str(tmp_path / "mini.jsonl"), str(tmp_path / "files")])
    for task, prompt in prompts.items():
        (item,) = BENCHMARKS[f"longbench_{task}"].load(str(tmp_path / "files"))
        assert item.prompt == prompt
