"""A wrong argument is refused before torch is imported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvthaw.cli import app
from kvthaw.methods import METHODS
from lab.__main__ import app as laboratory
from said import Said, program, refused

HEAVY = ("torch", "transformers", "triton", "numpy")
ROOT = Path(__file__).parents[2]
PROGRAM = """
import functools, json, os, sys, typer.main
from {module} import app
typer.main.get_command = functools.cache(typer.main.get_command)
typer.main.get_command(app)
for line in sys.stdin:
    if not os.fork():
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        code = 0
        try:
            app(json.loads(line))
        except SystemExit as end:
            code = end.code
        print("loaded:", *sorted({{name.partition(".")[0] for name in sys.modules}} & {heavy!r}), flush=True)
        sys.stderr.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.wait()[1])
    print(json.dumps([code, open("out").read(), open("err").read()]))
"""
"""Reads command lines as JSON and forks for each of them; modules and commands of the program are there by then."""


CASES: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("generate", "Hi", "--model", "./nowhere"), ("./nowhere", "no such folder")),
    (("generate", "Hi", "--model", "./nowhere.gguf"), ("./nowhere.gguf", "no such file")),
    (("chat", "--model", "FILE"), ("of files only .gguf",)),
    (("chat", "--model", "fake.gguf"), ("is not in the GGUF format",)),
    (("serve", "FOLDER"), ("holds no config.json",)),
    (("serve", "--model", "FOLDER"), ("holds no config.json",)),
    (("plan", "--model", "./nowhere"), ("no such folder",)),
    (("inspect", "--file", "FILE", "--question", "Who?", "-o", "page.html", "--model", "./nowhere"), ("no such folder",)),
    (("compare", "--out", "out", "--model", "./nowhere"), ("no such folder",)),
    (("bench", "decode", "--model", "./nowhere", "--file", "FILE"), ("no such folder",)),
    (("eval", "niah", "--method", "full,quets:budget=64,sink=4"), ("'quets'", "did you mean 'quest'")),
    (("eval", "perplexity", "--method", "pariskv_plus"), ("did you mean 'pariskv-plus'",)),
    (("generate", "Hi", "--kv", ""), ("--kv", "it is empty; name a folder")),
    (("serve", "--kv-dir", ""), ("--kv-dir", "it is empty; name a folder")),
    (("chat", "--kv-dir", ""), ("--kv-dir", "it is empty; name a folder")),
    (("chat", "--kv-dir", "FILE"), ("is a file; name a folder",)),
    (("generate", "Hi", "--method", "snapKV"), ("did you mean 'snapkv'",)),
    (("serve", "--method", "quest2"), ("did you mean 'quest'",)),
    (("plan", "--shape", "tiny", "--method", "parisk"), ("did you mean 'pariskv'",)),
    (("methods", "quets"), ("did you mean 'quest'",)),
    (("generate", "Hi", "--dtype", "float8"), ("dtype is 'float8'", "bfloat16")),
    (("generate", "Hi", "--device", "gpu"), ("device is 'gpu'", "cuda:1")),
    (("generate", "Hi", "--budget", "0"), ("--budget", "0")),
    (("generate", "Hi", "--budget", "64", "--retrieved", "9"), ("budget is 64 and retrieved is 9; give one of them",)),
    (("eval", "agreement", "--prompts", "broken.jsonl"), ("prompts is 'broken.jsonl'", "not JSON")),
    (("chat", "--device-memory", "much"), ("device_memory is 'much'",)),
    (("serve", "--kv-dtype", "fp9"), ("kv_dtype is 'fp9'",)),
    (("gen", "Hi"), ("Did you mean 'generate'?",)),
    (("plan", "--shape", "llma"), ("shape is 'llma'",)),
    (("plan", "--shape", "tiny", "--gpu", "H10"), ("did you mean 'H100'",)),
]  # fmt: skip


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], tuple[int, str, str]]:
    """Exit code, stdout and stderr of every command line."""
    folder, found = tmp_path_factory.mktemp("early"), dict[tuple[str, ...], tuple[int, str, str]]()
    (folder / "text.txt").write_text("Some text.")
    (folder / "fake.gguf").write_text("no model")
    (folder / "broken.jsonl").write_text('{"prompt": ')
    places = {"FILE": str(folder / "text.txt"), "FOLDER": str(folder)}
    for module, its in (("kvthaw.cli", app), ("lab.__main__", laboratory)):
        given = [one for one, _ in CASES if program(one) is its]
        lines = "".join(json.dumps([places.get(word, word) for word in one]) + "\n" for one in given)
        command, environment = PROGRAM.format(module=module, heavy=set(HEAVY)), os.environ | {"PYTHONPATH": str(ROOT)}
        how: dict[str, Any] = {"capture_output": True, "text": True, "cwd": folder, "env": environment, "timeout": 60}
        done = subprocess.run([sys.executable, "-c", command], input=lines, **how)
        assert done.returncode == 0, done.stderr
        found |= zip(given, map(json.loads, done.stdout.splitlines()), strict=True)
    return found


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that forks")
@pytest.mark.parametrize(("given", "words"), CASES, ids=str)
def test_nothing_heavy_is_imported_before(
    given: tuple[str, ...], words: tuple[str, ...], told: dict[tuple[str, ...], tuple[int, str, str]]
) -> None:
    code, out, err = told[given]
    assert code in (1, 2), err
    assert "loaded:\n" in out, out
    said = " ".join(err.replace("│", " ").split())
    assert all(word in said for word in words), err


COMMANDS = {
    "generate": ("generate", "Hi"),
    "chat": ("chat",),
    "serve": ("serve", "--port", "0"),
    "plan": ("plan", "--length", "100", "--gpu", "none"),
    "inspect": ("inspect", "--file", "text.txt", "--question", "Who?", "-o", "page.html"),
    "bench": ("bench", "decode", "--file", "text.txt"),
    "eval": ("eval", "agreement", "--file", "text.txt"),
    "compare": ("compare", "--task", "passkey", "--length", "100", "--out", "out"),
    "niah": ("eval", "niah", "--length", "100"),
}
WRONG = [
    ("--budget", "5", "budget is 5; the smallest that leaves room for retrieval is 16 tokens"),
    ("--dense-layers", "99", "dense_layers is 99; that leaves no layer to quest, of 2: it must be at most 1"),
    ("--method", "quest:nope=1", "no option 'nope'"),
    ("--method", "pqcache:parts=3", "parts is 3; it must be at least 1 and divide head_dim, 16"),
    ("--retrieved", "0", "retrieved is 0; it must be at least 1"),
    ("--device-memory", "0", "device_memory is '0'; it must be at least 1 byte"),
    ("--host-memory", "0", "host_bytes is 0; it must be at least 1"),
]
HAVE = {"--device-memory": ("generate", "chat", "serve", "plan"), "--host-memory": ("generate", "chat", "serve", "bench")}


@pytest.mark.parametrize(
    ("command", "option", "value", "words"),
    [(command, *wrong) for wrong in WRONG for command in HAVE.get(wrong[0], COMMANDS)],
)
def test_weights_are_not_read_before(
    command: str, option: str, value: str, words: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's weights cannot be read."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"no weights")
    (tmp_path / "text.txt").write_text("Some text. " * 20)
    method = () if option == "--method" else ("--method", "quest")
    said = Said(*COMMANDS[command], "--model", "model", *method, option, value)
    assert said.code == 1, said.err
    assert words in said.err
    assert said.out == ""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that forks")
def test_a_budget_that_is_too_small_needs_no_transformers(folder: Path, tmp_path: Path) -> None:
    """They take as long to import as torch."""
    (tmp_path / "text.txt").write_text("Some text. " * 20)
    wrong = ["--model", str(folder), "--method", "quest", "--budget", "5"]
    asked = [[*COMMANDS[name], *wrong] for name in COMMANDS if name not in ("compare", "niah")]
    command = "import kvthaw.methods.auto" + PROGRAM.format(module="kvthaw.cli", heavy={"transformers"})
    lines = "".join(json.dumps(one) + "\n" for one in asked)
    done = subprocess.run(
        [sys.executable, "-c", command], input=lines, capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for one, line in zip(asked, done.stdout.splitlines(), strict=True):
        code, out, err = json.loads(line)
        assert (code, out) == (1, "loaded:\n"), (one, out, err)
        assert "budget is 5; the smallest" in err


def test_usual_names_of_dtypes_are_taken(model: str) -> None:
    common = ("generate", "The grass is green. ", "--model", model, "--max-new-tokens", "2")
    assert Said(*common, "--dtype", "bf16").out == Said(*common, "--dtype", "bfloat16").out


def test_a_plugin_s_method_is_known_wherever_it_stands(model: str, tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text("from kvthaw.methods import METHODS as ALL\nMETHODS = {'mine-own': ALL['oracle']}\n")
    asked = ("generate", "The grass is green. ", "--model", model, "--max-new-tokens", "2", "--method", "mine-own")
    try:
        assert Said(*asked, "--plugin", str(plugin)).code == 0
    finally:
        METHODS.unregister("mine-own")
    refused(Said(*asked[:-1], "mine-owm"), 1, "mine-owm")


def test_a_missing_gpu_is_told_before_transformers_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(Said("generate", "Hi", "--device", "cuda"), 1, "device is 'cuda', but torch finds no GPU here")
