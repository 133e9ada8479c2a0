"""The command line, as a user meets it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import bytemodel
import kvthaw
from kvthaw import METHODS
from kvthaw.cli import app
from kvthaw.evaluate.published import BENCHMARKS
from kvthaw.evaluate.tasks import TASKS


class Said:
    """What a command said."""

    def __init__(self, *arguments: str, stdin: str | bytes | None = None) -> None:
        result = CliRunner().invoke(app, list(arguments), input=stdin, env={"COLUMNS": "200", "NO_COLOR": "1"})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        self.code, self.out, self.err = result.exit_code, result.stdout, result.stderr

    @property
    def records(self) -> list[Any]:
        """stdout, which must be JSON line by line."""
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(bytemodel.save(tmp_path_factory.mktemp("model")))


# Help


COMMANDS = [
    "generate",
    "methods",
    "eval",
    "eval task",
    "eval published",
    "eval recall",
    "eval drift",
    "eval perplexity",
    "eval shares",
    "lm-eval",
    "compare",
    "demo",
    "bench decode",
    "bench figures",
    "bench prefill",
    "bench kernels",
    "bench indexing",
    "bench serving",
]


@pytest.mark.parametrize("command", [name.split() for name in COMMANDS], ids=COMMANDS)
def test_every_help_has_examples(command: list[str]) -> None:
    said = Said(*command, "--help")
    assert said.code == 0
    assert "Examples:" in said.out
    assert f"kvthaw {' '.join(command)}".removesuffix(" task").removesuffix(" published") in said.out


def test_examples_name_methods_that_there_are() -> None:
    from kvthaw.cli import compare, demo, evaluate, generate, harness, perplexity, recall, shares
    from kvthaw.evaluate.describe import describe

    texts = [one.EXAMPLES for one in (compare, demo, evaluate, generate, harness, perplexity, shares)]
    examples = " ".join([*texts, recall.RECALL_EXAMPLES, recall.DRIFT_EXAMPLES])
    methods = re.findall(r"--methods? (\S+)|\bmethod=([^, ]+)", examples)
    assert len(methods) > 20
    for name in {name for found in methods for text in found for name in text.split(",")} - {"", "all"}:
        describe(kvthaw.methods.resolve(name))


def test_help_lists_commands_and_exit_codes() -> None:
    said = Said("--help")
    assert all(name in said.out for name in ("generate", "methods", "eval", "demo", "bench", "130"))
    assert all(task in Said("eval", "--help").out for task in TASKS)
    assert all(name in Said("eval", "gsm8k", "--help").out for name in BENCHMARKS)


def test_help_is_as_wide_as_the_terminal() -> None:
    said = Said("eval", "perplexity", "--help")
    line = "what follows in the text is sent through each method token by token, and every next token is scored"
    assert line in said.out, "not broken where the source is"


def test_a_published_benchmark_is_asked_and_reported(model: str, tmp_path: Path) -> None:
    data = Path(__file__).parent / "evaluate" / "published" / "gold" / "gsm8k.jsonl"
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
    assert [(line["method"], line["n"], line["samples"]) for line in said.records] == [("icecache", 1, 2), ("full", 1, 2)]
    assert said.records[0]["attended_max"] <= 64
    assert list(said.records[0]["pass_at"]) == ["1", "2"]
    plot = tmp_path / "scores.png"
    table = Said("eval", "gsm8k", *asked, "--plot", str(plot))
    assert plot.read_bytes().startswith(b"\x89PNG")
    refused(Said("eval", "gsm8k", *asked, "--plot", "nowhere/a.png"), 1, "folder does not exist")
    assert table.code == 0
    assert "gsm8k: 1 question" in table.out
    both = ("eval", "gsm8k,passkey", "--data", f"gsm8k={data}", "--model", model, "--samples", "1", "--length", "700")
    said = Said(*both, "--method", "full", "--probe", "0", "--json")
    assert [line["task"] for line in said.records] == ["gsm8k", "passkey"]
    missing = Said("eval", "gsm8k", "--model", model)
    assert (missing.code, missing.out) == (1, "")
    assert "gsm8k needs its data: a file, or hub" in missing.err


def test_a_name_of_several_benchmarks_has_their_mean(model: str, tmp_path: Path) -> None:
    for name in ("aime24", "aime25"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"id": 1, "problem": "1 + 1?", "answer": "2"}))
    common = ("--model", model, "--budget", "64", "--max-new-tokens", "3", "--temperature", "0", "--top-p", "1")
    asked = ("eval", "aime", "--data", str(tmp_path), *common)
    assert [(line["benchmark"], line["method"]) for line in Said(*asked, "--json").records] == [
        *(("aime24", "icecache"), ("aime24", "full")),
        *(("aime25", "icecache"), ("aime25", "full")),
    ]
    plot = tmp_path / "scores.png"
    table = Said(*asked, "--plot", str(plot))
    assert all(word in table.out for word in ("aime24", "aime25", "mean", "icecache", "full"))
    assert plot.read_bytes().startswith(b"\x89PNG")
    (tmp_path / "aime25.jsonl").unlink()
    refused(Said(*asked), 1, "that folder holds none of aime25.jsonl, aime25.jsonl.gz")


def test_version() -> None:
    assert Said("--version").out == f"kvthaw {kvthaw.__version__}\n"


def test_help_needs_no_torch() -> None:
    code = "import sys, kvthaw.cli; sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'matplotlib')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# methods


def test_methods_are_those_of_the_list() -> None:
    records = json.loads(Said("methods", "--json").out)
    assert [record["name"] for record in records] == list(METHODS)
    by_name = {record["name"]: record for record in records}
    assert by_name["full"]["kv"] == "dense"
    assert by_name["streaming"]["kv"] == "evicts"
    assert by_name["oracle"] == {
        "name": "oracle",
        "paper": "-",
        "unit": "token",
        "kv": "offloads",
        "decides": "device",
        "graph_safe": True,
        "bytes_a_key": 256,
    }
    assert by_name["h2o"]["kv"] == "evicts"
    table = Said("methods").out
    assert all(name in table for name in METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_tells_its_options(name: str) -> None:
    """Its defaults are options that it takes."""
    (told,) = Said("methods", name, "--json").records
    assert told["name"] == name
    assert len(told["text"]) > 60
    given = {option: of["default"] for option, of in told["options"].items()}
    assert kvthaw.methods.resolve(name, **given).name == name
    said = Said("methods", name).out
    assert said.startswith(f"{name}: {told['text'][:40]}")
    for option, of in told["options"].items():
        row = next(line for line in said.splitlines() if line.startswith(f"│ {option} "))
        assert str(of["default"]) in row
        assert of["takes"] in row


def test_options_are_told_with_what_they_take() -> None:
    (told,) = Said("methods", "prkv", "--json").records
    assert told["options"]["share"] == {"default": 0.25, "takes": "a number or one of auto"}
    (told,) = Said("methods", "icecache-reuse", "--json").records
    assert told["options"]["reuse"] == {"default": 3, "takes": "a whole number"}
    refused(Said("methods", "parisk"), 1, "method is 'parisk'; did you mean 'pariskv'?")


# generate


def test_generate_from_argument_file_and_stdin(model: str, tmp_path: Path) -> None:
    text = "The grass is green. " * 20
    path = tmp_path / "prompt.txt"
    path.write_text(text)
    common = ("--model", model, "--method", "oracle", "--budget", "64", "--max-new-tokens", "6")
    streamed = Said("generate", text, *common)
    assert streamed.code == 0
    assert streamed.out.strip()
    assert "tokens attended a step" in streamed.err
    assert streamed.out == Said("generate", "--file", str(path), *common, "--no-stream").out
    assert streamed.out == Said("generate", *common, stdin=text).out
    record = Said("generate", text, *common, "--json").records[0]
    assert record["text"] + "\n" == streamed.out
    assert record["prompt_tokens"] == len(text)
    assert record["new_tokens"] == 6
    assert record["finish"] == "length"
    assert record["sparse_steps"] == 2 * 5
    assert record["attended_max"] <= record["budget"] == 64
    assert record["ttft_s"] < record["tt2t_s"]


def test_generate_draws_by_its_seed(model: str) -> None:
    def draw(seed: int) -> str:
        arguments = ("--model", model, "--method", "full", "--temperature", "2", "--seed", str(seed), "--max-new-tokens", "12")
        return str(Said("generate", "Hello there", *arguments, "--json").records[0]["text"])

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_generate_takes_fractions_and_retrieved(model: str) -> None:
    text = "The grass is green. " * 20
    common = ("--model", model, "--method", "oracle", "--max-new-tokens", "4", "--json")
    assert Said("generate", text, *common, "--budget", "0.25").records[0]["budget"] == 100
    record = Said("generate", text, *common, "--retrieved", "10", "--dense-layers", "1").records[0]
    assert (record["retrieved"], record["dense_layers"]) == (10, 1)


# eval

FIELDS = {"task", "method", "budget", "retrieved", "length", "n", "accuracy", "full_accuracy", "attention_mass", "recall_at_k"}
FIELDS |= {"hit_rate", "kv_device_bytes", "kv_host_bytes", "ttft_s", "tpot_s", "dense_layers", "attended_mean", "attended_max"}
FIELDS |= {"seed", "question", "versions"}


def test_eval_prints_one_object_a_run(model: str, tmp_path: Path) -> None:
    out, plot = tmp_path / "out.jsonl", tmp_path / "plot.png"
    arguments = ["eval", "passkey", "--model", model, "--method", "full,oracle,streaming", "--budget", "64,128"]
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


def test_eval_takes_dense_layers_and_the_sparse_question(model: str) -> None:
    arguments = (
        "--model",
        model,
        "--method",
        "oracle",
        "--budget",
        "64",
        "--length",
        "400",
        "--samples",
        "1",
        "--depths",
        "50",
    )
    said = Said("eval", "passkey", *arguments, "--dense-layers", "0,1", "--question", "sparse", "--json")
    assert [(r["dense_layers"], r["question"]) for r in said.records] == [(0, "sparse"), (1, "sparse")]
    assert said.records[0]["kv_dense_bytes"] == 0 < said.records[1]["kv_dense_bytes"]


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
    gone = ("--model", "./not-looked-for")
    refused(Said("eval", "longeval", *gone, "--data", "nowhere"), 1, "nowhere", "no such file")
    refused(Said("eval", "passkey", *gone, "--data", str(tmp_path)), 1, "passkey is generated")
    refused(Said("eval", "passkey", *gone, "--data", f"longeval={tmp_path}"), 2, "longeval is not among the tasks")
    refused(Said("eval", "babilong", *gone, "--data", str(tmp_path)), 1, "holds no file qa1_")
    refused(Said("eval", "passkey,rulers", *gone), 2, "'rulers'", "ruler_vt")


def test_eval_perplexity(model: str, tmp_path: Path) -> None:
    plot, out = tmp_path / "ppl.png", tmp_path / "ppl.jsonl"
    arguments = ["eval", "perplexity", "--model", model, "--method", "streaming", "--budget", "64", "--length", "100,200"]
    arguments += ["--steps", "4", "--out", str(out)]
    said = Said(*arguments, "--json", "--plot", str(plot))
    assert [(record["method"], record["length"]) for record in said.records] == [
        ("streaming", 100),
        ("streaming", 200),
        ("full", 100),
        ("full", 200),
    ]
    assert plot.read_bytes().startswith(b"\x89PNG")
    table = Said(*arguments)
    assert len(out.read_text().splitlines()) == 4
    assert all(word in table.out for word in ("perplexity", "streaming", "full", "200", "nats"))


# eval recall, eval drift

PARIS = "pariskv:window=16:buffer=16"


def test_recall_prints_one_object_a_run(model: str, tmp_path: Path) -> None:
    out, plot = tmp_path / "out.jsonl", tmp_path / "plot.png"
    arguments = ["eval", "recall", "--model", model, "--method", f"{PARIS},quest", "--budget", "64", "--retrieved", "10"]
    arguments += ["--length", "700", "--steps", "4", "--out", str(out)]
    said = Said(*arguments, "--json", "--plot", str(plot))
    assert said.code == 0
    assert [(r["method"], r["budget"], r["retrieved"]) for r in said.records] == [
        (PARIS, 64, None),
        (PARIS, None, 10),
        ("quest", 64, None),
        ("quest", None, 10),
    ]
    named = {"recall_at_k", "attention_mass", "mass_of_exact", "retrieved_of_exact", "output_error", "ceiling", "rows"}
    for record in said.records:
        assert set(record) >= named | {"layers", "bins", "kinds", "samples", "seed", "versions", "model", "length"}
        assert set(record["kinds"]) == {"text", "needle"}
        assert [layer["layer"] for layer in record["layers"]] == [0, 1]
        assert ("recall_at_10" in record) == (record["retrieved"] == 10)
        assert record["eval"] == "recall"
        assert (record["ceiling"] is None) == (record["method"] == "quest")
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert len(out.read_text().splitlines()) == 4 * 2
    table = Said(*arguments)
    assert len(out.read_text().splitlines()) == 4 * 2
    assert "ceiling" in table.out
    assert table.out.count("10 rows") == 2 * 2


def test_recall_by_layer_of_a_text(model: str, tmp_path: Path) -> None:
    text, plot = tmp_path / "text.txt", tmp_path / "plot.png"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 5)
    arguments = (
        "--model",
        model,
        "--method",
        "quest,streaming",
        "--prompt",
        "text",
        "--text",
        str(text),
        "--length",
        "300,400",
    )
    said = Said("eval", "recall", *arguments, "--steps", "2", "--json", "--plot", str(plot))
    assert [(r["method"], r["length"], r["budget"]) for r in said.records] == [
        ("quest", 300, 256),
        ("streaming", 300, 256),
        ("quest", 400, 256),
        ("streaming", 400, 256),
    ]
    assert said.records[1]["recall_at_k"] is None
    assert len({record["text"] for record in said.records} | {"book"}) == 2
    assert plot.exists()


def test_drift_shows_first_and_last_quarter(model: str, tmp_path: Path) -> None:
    out, plot = tmp_path / "out.jsonl", tmp_path / "plot.png"
    arguments = ["eval", "drift", "--model", model, "--length", "300", "--new-tokens", "40", "--probe", "5", "--retrieved", "8"]
    arguments += ["--method", f"{PARIS},{PARIS}:centroids=learned", "--out", str(out)]
    said = Said(*arguments, "--json", "--plot", str(plot))
    assert said.code == 0
    assert len(said.records) == len(out.read_text().splitlines()) == 2
    for record in said.records:
        assert (len(record["quarters"]), len(record["bins"])) == (4, 8)
        assert all(0 < part["recall_at_8"] <= 1 for part in record["quarters"])
        assert record["eval"] == "drift"
        assert record["follow"] == "text"
    assert plot.read_bytes().startswith(b"\x89PNG")
    table = Said(*arguments).out
    assert "quarter" in table
    assert "last" in table
    assert "ceiling" in table
    assert "40 tokens (the text's own) after 300" in table


@pytest.mark.parametrize(("follow", "words"), [("own", "each method's own"), ("full", "full attention's, for all")])
def test_drift_says_whose_tokens_were_sent(model: str, tmp_path: Path, follow: str, words: str) -> None:
    arguments = ["eval", "drift", "--model", model, "--length", "99", "--new-tokens", "8", "--probe", "2", "--method", "quest"]
    arguments += ["--follow", follow, "--out", str(tmp_path / "out.jsonl")]
    sent = Said(*arguments, "--json").records[0]
    assert (sent["follow"], sent["temperature"], sent["retrieved"]) == (follow, 1.0, 100)
    assert f"8 tokens ({words}, temperature 1.0) after 99" in Said(*arguments).out


# eval shares


def test_shares_prints_a_table_of_lengths_and_rows(model: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    arguments = [
        "eval",
        "shares",
        "--model",
        model,
        "--length",
        "300,400",
        "--rows",
        "32,64",
        "--prompt",
        "text",
        "--page",
        "8",
    ]
    said = Said(*arguments, "--json", "--out", str(out))
    assert [(r["length"], r["rows"]) for r in said.records] == [(300, 32), (300, 64), (400, 32), (400, 64)]
    assert all(0 <= r["share"] <= 1 for r in said.records)
    assert len(out.read_text().splitlines()) == 4
    table = Said(*arguments, "--out", str(out)).out
    assert "300 tokens" in table
    assert f"automatic static share S: {model}, pages of 8, window 64, 1 prompt a cell\n" in table
    assert f"{said.records[0]['share']:.3f}" in table


# demo


def test_demo_answers_from_one_prefill(model: str) -> None:
    arguments = ("demo", "--model", model, "--method", "oracle", "--budget", "64", "--length", "1700")
    said = Said(*arguments)
    assert said.code == 0
    assert said.out.count("right") + said.out.count("wrong") == 10 + 1  # and once on the card
    assert "What is the pass key?" in said.out
    assert "attention mass covered" in said.out
    record = Said(*arguments, "--json").records[0]
    assert 1600 < record["prompt_tokens"] <= 1700
    assert len(record["questions"]) == len(record["thawed"]["answers"]) == len(record["full"]["answers"]) == 5
    assert record["thawed"]["sparse_steps"] > 0 == record["full"]["sparse_steps"]
    assert record["thawed"]["attended_max"] <= 64
    assert record["thawed"]["kv_device_bytes"] < record["full"]["kv_device_bytes"] / 10


@pytest.mark.model
def test_demo_on_the_shipped_model_is_right() -> None:
    record = Said("demo", "--length", "6000", "--json").records[0]
    assert record["full"]["right"] == [True] * 5
    assert record["thawed"]["right"] == [True] * 5
    assert record["thawed"]["attended_max"] <= 256


# bench


def test_bench_hands_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvthaw.bench import decode, figures
    from kvthaw.bench.asked import Decode, Figures

    given: list[Any] = []
    for module in (decode, figures):
        monkeypatch.setattr(module, "main", lambda asked, **_: given.append(asked) or {})
    options = ["--shape", "qwen3-4b", "--length", "100,200", "--method", "full", "--hits", "0.7", "--share-host", "--json"]
    assert Said("bench", "decode", *options).code == 0
    assert Said("bench", "figures", "--name", "length,throughput", "--shrink", "4", "--draw", "--json").code == 0
    assert given == [
        Decode(shape="qwen3-4b", length=(100, 200), method=("full",), hits=0.7, share_host=True),
        Figures(name=("length", "throughput"), shrink=4, draw=True),
    ]


def test_bench_refuses_what_it_cannot_read() -> None:
    refused(Said("bench", "decode", "--length", "4k"), 2, "length is '4k'", "whole number")
    refused(Said("bench", "decode", "--shape", "tiny7"), 1, "shape is 'tiny7'", "llama-3.1-8b")
    refused(Said("bench", "decode", "--plot", "nowhere/a.png"), 1, "folder does not exist")
    refused(Said("bench", "figures", "--name", "lenght"), 1, "name is 'lenght'", "throughput")


def test_bench_decode_prints_lines_or_a_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kvthaw.bench import shapes

    monkeypatch.setitem(shapes.SHAPES, "tiny", lambda: shapes._llama(64, 96, 2, 4, 2, 16, 128))
    out = tmp_path / "out.jsonl"
    options = ["--method", "full,quest", "--budget", "64", "--length", "256", "--new-tokens", "8", "--out", str(out)]
    said = Said("bench", "decode", *options, "--json")
    assert said.code == 0
    assert said.records == [json.loads(line) for line in out.read_text().splitlines()]
    assert [(record["setting"]["method"], record["setting"]["budget"]) for record in said.records] == [
        ("full", None),
        ("quest", 64),
    ]
    table = Said("bench", "decode", *options)  # nothing is measured again
    assert out.read_text().count("\n") == 2
    assert "quest, 64" in table.out
    assert all(part in table.out for part in ("query ms", "fetch ms", "attention ms", "model ms", "bus MB", "floor ms"))


def test_bench_indexing_shows_shares(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    said = Said("bench", "indexing", "--length", "120", "--budget", "64", "--runs", "1", "--out", str(out))
    assert said.code == 0
    assert "of prefill" in said.out
    assert [json.loads(line)["method"] for line in out.read_text().splitlines()] == ["clusterkv", "prkv"]
    refused(
        Said("bench", "indexing", "--length", "60", "--runs", "1", "--method", "oracle"),
        1,
        "method is 'oracle'",
        "pages and clusters",
    )


def test_bench_serving_shows_steps(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    some = ("bench", "serving", "--lanes", "2", "--requests", "3", "--length", "40", "--method", "full", "--out", str(out))
    said = Said(*some, "--new-tokens", "16")
    assert said.code == 0
    assert "tokens/s" in said.out
    assert [json.loads(line)["method"] for line in out.read_text().splitlines()] == ["full"]
    refused(Said(*some, "--new-tokens", "3"), 1, "none had all 2 lanes busy")


def test_bench_kernels_checks_and_times_the_tree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kvthaw.bench import kernels_tree

    small, out = kernels_tree.filled(300, 1), tmp_path / "out.jsonl"
    monkeypatch.setattr(kernels_tree, "filled", lambda length, layers: small)
    said = Said("bench", "kernels", "--method", "icecache", "--quick", "--json", "--out", str(out))
    assert said.code == 0
    assert said.records == [json.loads(line) for line in out.read_text().splitlines()]
    for record in said.records:
        assert set(record) >= {"bench", "tree_ms", "flat_ms", "recall", "attention_mass", "commit", "torch"}
    table = Said("bench", "kernels", "--method", "icecache", "--quick").out
    assert table.count("tree_ms=") == len(said.records)


def test_bench_kernels_runs_a_shared_benchmark_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvthaw.bench import kernels_decode, kernels_pages, kernels_pariskv

    ran: list[tuple[str, dict[str, Any]]] = []
    for module in (kernels_decode, kernels_pages, kernels_pariskv):
        monkeypatch.setattr(module, "main", lambda module=module, **given: ran.append((module.__name__, given)) or [])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert Said("bench", "kernels", "--method", "clusterkv,prkv,quest,arkvale,pariskv", "--json").code == 0
    given = {"quick": False, "out": None}
    assert ran == [("kvthaw.bench.kernels_pages", given), ("kvthaw.bench.kernels_pariskv", given)]


def test_bench_kernels_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refused(Said("bench", "kernels", "--method", "icecache,pariskv,decode"), 2, "pariskv, decode", "needs a CUDA device")
    refused(Said("bench", "kernels", "--method", "quests"), 2, "'quests' has no kernels")


# Errors


def refused(said: Said, code: int, *words: str) -> None:
    """One readable line on stderr, nothing on stdout."""
    assert said.code == code
    assert said.out == ""
    assert all(word in said.err for word in words), said.err
    assert "Traceback" not in said.err
    if code == 1:
        assert len(said.err.strip().splitlines()) == 1


def test_errors_are_one_line_and_exit_code_1(model: str, tmp_path: Path) -> None:
    generate = ("generate", "Hello", "--model", model)
    refused(Said(*generate, "--method", "icecahe"), 1, "icecahe", "did you mean 'icecache'?")
    refused(Said(*generate, "--method", "oracle", "--budget", "8"), 1, "budget is 8", "16")
    refused(Said(*generate, "--budget", "64", "--retrieved", "8"), 1, "give one of them")
    refused(Said(*generate, "--device", "abacus"), 1, "device is 'abacus'")
    refused(Said(*generate, "--dtype", "int3"), 1, "dtype is 'int3'", "bfloat16")
    refused(Said("generate", "Hello", "--model", "./nowhere"), 1, "'./nowhere'", "no such folder")
    refused(Said("generate", "Hello", "--model", str(tmp_path)), 1, "no config.json")
    refused(Said("generate", "", "--model", model), 1, "the prompt is empty")
    refused(Said("generate", "--model", model, stdin="  \n"), 1, "the prompt is empty")
    refused(Said("generate", "a" * 3000, "--model", model), 1, "3,000 tokens", "2,048")
    refused(Said("eval", "passkey", "--model", model, "--length", "10"), 1, "length 10 is too short")
    refused(Said("eval", "passkey", "--model", model, "--method", "orakle"), 1, "oracle")
    refused(Said("eval", "passkey", "--method", "icecache:page=4"), 1, "icecache has no option 'page'", "page_size")
    refused(Said("eval", "passkeyy"), 2, "did you mean 'passkey'?")
    refused(Said("eval", "passkey", "--model", model, "--out", "/nowhere/x", "--length", "300"), 1, "/nowhere/x")
    refused(Said("eval", "passkey", "--question", "both"), 1, "question is 'both'")
    refused(Said("demo", "--model", model, "--length", "100"), 1, "length is 100")
    recall = ("eval", "recall", "--model", "./not-looked-for")
    for command in (recall, ("eval", "drift"), ("eval", "passkey")):
        refused(Said(*command, "--plot", "plot.txt"), 1, "plot is 'plot.txt'", ".png")
        refused(Said(*command, "--plot", "/nowhere/plot.png"), 1, "'/nowhere/plot.png'", "folder does not exist")
        refused(Said(*command, "--out", "/nowhere/x"), 1, "/nowhere/x", "folder does not exist")
    refused(Said(*recall, "--method", "quest,clusterkv:distance=ip"), 1, "distance is 'ip'", "cosine, l2, inner")
    recall = ("eval", "recall", "--model", model)
    refused(Said(*recall, "--method", "pariskv:beta=2.0"), 1, "beta is 2.0")
    refused(Said(*recall, "--method", "full"), 1, "'full'; it attends to everything")
    refused(Said(*recall, "--prompt", "poem"), 1, "prompt is 'poem'", "needle")
    refused(Said(*recall, "--length", "100"), 1, "length 100 is too short")
    refused(Said(*recall, "--length", "4096", "--prompt", "text"), 1, "4,128 tokens", "2,048")
    refused(Said(*recall, "--steps", "4", "--probe", "5"), 1, "probe is 5", "4 steps")
    refused(Said("eval", "drift", "--model", model, "--follow", "you"), 1, "follow is 'you'", "text, full, own")
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9 au lait")
    refused(Said("generate", "--file", str(latin), "--model", model), 1, "latin.txt is not UTF-8", "byte 3")
    refused(Said("generate", "--model", model, stdin=latin.read_bytes()), 1, "stdin is not UTF-8", "byte 3")
    refused(Said("generate", "caf\udce9", "--model", model), 1, "the prompt is not UTF-8", "byte 3")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    refused(Said("generate", "Hello", "--model", str(broken)), 1, "could not be loaded")


def test_wrong_usage_is_exit_code_2(model: str) -> None:
    refused(Said("generate", "Hello", "--budget", "lots"), 2, "'lots'")
    refused(Said("generate", "Hello", "--file", "nowhere.txt"), 2, "nowhere.txt")
    refused(Said("generate", "Hello", "--max-new-tokens", "0"), 2, "max-new-tokens")
    refused(Said("eval", "passkeys"), 2, "'passkeys'", "variable_tracking")
    refused(Said("eval", "passkey", "--length", "4k"), 2, "'4k'")
    refused(Said("eval", "passkey", "--depths", ","), 2, "--depths")
    refused(Said("eval", "passkey", "--depths", "50,120"), 2, "--depths", "120", "between 0 and 100")
    refused(Said("eval", "recall", "--retrieved", "many"), 2, "'many'", "--retrieved")
    refused(Said("eval", "recall", "--text", "nowhere.txt"), 2, "nowhere.txt")
    refused(Said("eval", "drift", "--new-tokens", "40"), 2, "--probe", "every 16th of 40")
    refused(Said("thaw"), 2, "thaw")


def test_nan_in_the_keys_is_one_line(model: str, tmp_path: Path) -> None:
    import shutil

    import torch
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "nan"
    shutil.copytree(model, folder)
    llm = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        llm.model.layers[1].self_attn.k_proj.weight[0, 0] = torch.nan
    llm.save_pretrained(folder)
    said = Said("generate", "Hello " * 40, "--model", str(folder), "--method", "oracle", "--no-stream")
    refused(said, 1, "not finite in layer 1")


def test_ctrl_c_is_exit_code_130(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvthaw.evaluate import decode

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(decode, "prefill", stop)
    said = Said("generate", "Hello", "--model", model)
    assert (said.code, said.err.strip()) == (130, "kvthaw: stopped")


@pytest.mark.slow
def test_a_real_ctrl_c_stops_a_running_command(tmp_path: Path) -> None:
    model = str(bytemodel.save(tmp_path, ends=False))
    command = [sys.executable, "-m", "kvthaw", "generate", "Hello", "--model", model, "--method", "oracle"]
    command += ["--max-new-tokens", "100000", "--temperature", "3"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "NO_COLOR": "1"},
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # a suite in the background ignores it, and so would this
    )
    assert process.stdout is not None
    process.stdout.read(1)  # it streams
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err.decode()
    assert b"Traceback" not in err
    assert b"kvthaw: stopped" in err
