"""python -m lab eval BENCHMARK."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from said import Said, refused


def test_a_published_benchmark_is_asked_and_reported(model: str, tmp_path: Path) -> None:
    data = Path(__file__).parents[1] / "evaluate" / "published" / "gold" / "gsm8k.jsonl"
    asked = (
        "--data",
        str(data),
        "--model",
        model,
        "--limit",
        "1",
        "--length",
        "900",
        "--max-new-tokens",
        "4",
        "--budget",
        "64",
    )
    said = Said("eval", "gsm8k", *asked, "--samples", "2", "--temperature", "0.6", "--top-p", "0.95", "--json")
    assert [(line["method"], line["n"], line["samples"]) for line in said.records] == [
        ("icecache-digest", 1, 2),
        ("full", 1, 2),
    ]
    assert said.records[0]["attended_max"] <= 64
    assert list(said.records[0]["pass_at"]) == ["1", "2"]
    plot = tmp_path / "scores.png"
    table = Said("eval", "gsm8k", *asked, "--plot", str(plot))
    assert plot.read_bytes().startswith(b"\x89PNG")
    refused(Said("eval", "gsm8k", *asked, "--plot", "nowhere/a.png"), 1, "folder does not exist")
    assert table.code == 0
    assert "gsm8k: 1 question" in table.out
    refused(Said("eval", "passkey,gsm8k", "--model", model), 2, "task is 'gsm8k'")
    missing = Said("eval", "gsm8k", "--model", model)
    assert (missing.code, missing.out) == (1, "")
    assert "gsm8k needs its data: a file, or hub" in missing.err


def test_a_name_of_several_benchmarks_has_their_mean(model: str, tmp_path: Path) -> None:
    for name in ("aime24", "aime25"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"id": 1, "problem": "1 + 1?", "answer": "2"}))
    common = ("--model", model, "--budget", "64", "--max-new-tokens", "3", "--temperature", "0", "--top-p", "1")
    asked = ("eval", "aime", "--data", str(tmp_path), *common)
    assert [(line["benchmark"], line["method"]) for line in Said(*asked, "--json").records] == [
        *(("aime24", "icecache-digest"), ("aime24", "full")),
        *(("aime25", "icecache-digest"), ("aime25", "full")),
    ]
    plot = tmp_path / "scores.png"
    table = Said(*asked, "--plot", str(plot), "--question", "dense,sparse")
    assert table.out.count("question dense") == table.out.count("question sparse") == 1
    assert all(word in table.out for word in ("aime24", "aime25", "mean", "icecache-digest", "full"))
    assert plot.read_bytes().startswith(b"\x89PNG")
    listed = Said("eval", "aime25,aime24", *asked[2:], "--json").records
    assert [line["benchmark"] for line in listed] == ["aime25", "aime25", "aime24", "aime24"]
    refused(Said("eval", "aime24,aime26", *asked[2:]), 2, "'aime26' is not a benchmark")
    (tmp_path / "aime25.jsonl").unlink()
    refused(Said(*asked), 1, "that folder holds none of aime25.jsonl, aime25.jsonl.gz")


def test_a_benchmark_without_full_attention_in_shards(model: str, tmp_path: Path) -> None:
    (tmp_path / "aime24.jsonl").write_text(
        "".join(json.dumps({"id": i, "problem": "1 + 1? " * 9, "answer": "2"}) + "\n" for i in (1, 2))
    )
    asked = ("eval", "aime24", "--data", str(tmp_path), "--model", model, "--method", "quest:budget=48,oracle:retrieved=9")
    asked += ("--max-new-tokens", "6", "--temperature", "0", "--no-full", "--probe", "1", "--out", str(tmp_path / "out.jsonl"))
    for shard in ("1/2", "2/2"):
        assert Said(*asked, "--kv-dir", str(tmp_path / "kv"), "--shard", shard).out == ""
    assert len(list((tmp_path / "kv").iterdir())) == 1  # both ask the same
    found = Said(*asked, "--json").records
    assert [(one["method"], one["n"], one["full_score"]) for one in found] == [("quest", 2, None), ("oracle", 2, None)]
    assert all(0 < one["recall_at_k"] <= 1 and len(one["drift"]) == 4 for one in found)
    assert "last 1/4" in Said(*asked).out
    refused(Said(*asked[:-2], "--shard", "1/2"), 2, "needs --out")
    refused(Said(*asked, "--no-chat", "--thinking"), 2, "chat template")
    refused(Said(*asked, "--thinking"), 1, "no chat template")


def test_what_is_printed_says_how_it_was_asked(model: str, tmp_path: Path) -> None:
    """Accuracies under a chat template, a system prompt or without thinking are other numbers than those of plain text."""
    folder = shutil.copytree(model, tmp_path / "chat")
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if enable_thinking %}<think>{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    (tmp_path / "aime24.jsonl").write_text(json.dumps({"id": 1, "problem": "1 + 1?", "answer": "2"}) + "\n")
    asked = (
        "eval",
        "aime24",
        "--data",
        str(tmp_path),
        "--model",
        str(folder),
        "--method",
        "quest:budget=48",
        "--max-new-tokens",
        "4",
    )
    asked += ("--system", "Be brief.", "--no-thinking", "--no-full", "--out", str(tmp_path / "out.jsonl"))
    (found,) = Said(*asked, "--json").records
    assert (found["chat"], found["system"], found["thinking"]) == (True, "Be brief.", False)
    assert "cpu, chat template, system 'Be brief.', thinking off" in " ".join(Said(*asked).out.split())
